"""Routing policies: choose the worker for a request from the routable workers and the ledger. Pure.

Load is counted in *outstanding tokens*: the prompt tokens of the requests that a worker has and has not finished. The
ledger knows them at once, while the workers' own reports are always a little old: a burst of requests between two
reports is spread as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.messages.routing import AssignRequest, Charge


@dataclass(frozen=True)
class _Charge:
    worker: str
    tokens: int
    at: float


class Ledger:
    """The unfinished requests of each worker, and their tokens. Requests are identified by (frontend, request id)."""

    def __init__(self) -> None:
        self._charges: dict[tuple[str, str], _Charge] = {}
        self._outstanding: Counter[str] = Counter()
        self._last_assigned: dict[str, int] = {}
        self._assignments = 0

    def charge(self, frontend: str, request_id: str, worker: str, tokens: int, now: float = 0.0) -> None:
        """Enter an assignment. An earlier one of the same request is replaced: a request has one owner."""
        self.release(frontend, request_id)
        self._charges[frontend, request_id] = _Charge(worker, tokens, now)
        self._outstanding[worker] += tokens
        self._assignments += 1
        self._last_assigned[worker] = self._assignments

    def release(self, frontend: str, request_id: str) -> None:
        """Remove a request that has finished or left its worker. Unknown requests are ignored."""
        charge = self._charges.pop((frontend, request_id), None)
        if charge is not None:
            self._outstanding[charge.worker] -= charge.tokens

    @property
    def charged(self) -> Counter[str]:
        """Number of charged requests, by frontend."""
        return Counter(frontend for frontend, _ in self._charges)

    def of_frontend(self, frontend: str) -> tuple[Charge, ...]:
        """All charges of a frontend's requests."""
        return tuple(
            Charge(request_id, charge.worker, charge.tokens)
            for (owner, request_id), charge in self._charges.items()
            if owner == frontend
        )

    def settle(self, frontend: str, charges: Sequence[Charge], since: float, now: float) -> None:
        """Replace the charges of a frontend by its own account, which may lack those entered after `since`."""
        told = {charge.request_id for charge in charges}
        for key in [key for key, charge in self._charges.items() if key[0] == frontend and charge.at < since]:
            if key[1] not in told:
                self.release(*key)
        for charge in charges:
            known = self._charges.get((frontend, charge.request_id))
            if known is None or (known.worker, known.tokens) != (charge.worker, charge.tokens):
                self.charge(frontend, charge.request_id, charge.worker, charge.tokens, now)

    def forget_frontend(self, frontend: str) -> None:
        """Release all requests of a frontend that is gone."""
        for owner, request_id in [key for key in self._charges if key[0] == frontend]:
            self.release(owner, request_id)

    def forget_worker(self, worker: str) -> None:
        """Drop all charges of a worker that is gone."""
        for key in [key for key, charge in self._charges.items() if charge.worker == worker]:
            del self._charges[key]
        self._outstanding.pop(worker, None)
        self._last_assigned.pop(worker, None)

    def outstanding(self, worker: str) -> int:
        """Outstanding tokens of a worker."""
        return self._outstanding[worker]

    def last_assigned(self, worker: str) -> int:
        """Number of the assignment by which the worker was last charged, counted over all workers; 0 if never."""
        return self._last_assigned.get(worker, 0)


class RoutingPolicy(Protocol):
    """Chooses a worker from `candidates`, which are all routable. Returns a lease, or None to assign none."""

    def choose(self, request: AssignRequest, candidates: Sequence[Presence], ledger: Ledger) -> str | None: ...


class LeastOutstandingTokens:
    """Chooses the worker with the fewest outstanding tokens; of equals, the one that was assigned longest ago."""

    def choose(self, request: AssignRequest, candidates: Sequence[Presence], ledger: Ledger) -> str | None:
        """Workers in `request.avoid` are chosen only if there is no other."""
        if not candidates:
            return None
        avoid = frozenset(request.avoid)
        best = min(
            candidates,
            key=lambda p: (
                p.lease in avoid,
                ledger.outstanding(p.lease),
                ledger.last_assigned(p.lease),
                p.watcher,
                p.lease,
            ),
        )
        return best.lease
