"""Which worker takes a request. Pure: a policy sees the routable workers and the ledger, and names a lease.

Load is counted in *outstanding tokens*: the prompt tokens of all requests that a worker was given and has not
finished. It is known exactly and at once, where the workers' own reports are always a little old, so that a burst
of requests between two reports still spreads.
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
    """Who was given what, and is not done with it. Requests are known by (frontend, request id)."""

    def __init__(self) -> None:
        self._charges: dict[tuple[str, str], _Charge] = {}
        self._outstanding: Counter[str] = Counter()
        self._last_given: dict[str, int] = {}
        self._turn = 0

    def charge(self, frontend: str, request_id: str, worker: str, tokens: int, now: float = 0.0) -> None:
        """Note an assignment. One of the same request replaces the former: a request has one owner."""
        self.release(frontend, request_id)
        self._charges[frontend, request_id] = _Charge(worker, tokens, now)
        self._outstanding[worker] += tokens
        self._turn += 1
        self._last_given[worker] = self._turn

    def release(self, frontend: str, request_id: str) -> None:
        """The request is done, or gone. Unknown ones are ignored."""
        charge = self._charges.pop((frontend, request_id), None)
        if charge is not None:
            self._outstanding[charge.worker] -= charge.tokens

    @property
    def charged(self) -> Counter[str]:
        """Number of charged requests, by frontend."""
        return Counter(frontend for frontend, _ in self._charges)

    def of_frontend(self, frontend: str) -> tuple[Charge, ...]:
        """What a frontend has been charged with."""
        return tuple(
            Charge(request_id, charge.worker, charge.tokens)
            for (owner, request_id), charge in self._charges.items()
            if owner == frontend
        )

    def settle(self, frontend: str, charges: Sequence[Charge], since: float, now: float) -> None:
        """Take over what a frontend says of itself. What was charged after `since` it may not know yet."""
        told = {charge.request_id for charge in charges}
        for key in [key for key, charge in self._charges.items() if key[0] == frontend and charge.at < since]:
            if key[1] not in told:
                self.release(*key)
        for charge in charges:
            known = self._charges.get((frontend, charge.request_id))
            if known is None or (known.worker, known.tokens) != (charge.worker, charge.tokens):
                self.charge(frontend, charge.request_id, charge.worker, charge.tokens, now)

    def forget_frontend(self, frontend: str) -> None:
        """Release everything that a frontend, now gone, had assigned."""
        for owner, request_id in [key for key in self._charges if key[0] == frontend]:
            self.release(owner, request_id)

    def forget_worker(self, worker: str) -> None:
        """Drop everything about a worker that is gone."""
        for key in [key for key, charge in self._charges.items() if charge.worker == worker]:
            del self._charges[key]
        self._outstanding.pop(worker, None)
        self._last_given.pop(worker, None)

    def outstanding(self, worker: str) -> int:
        """Tokens of the worker's unfinished requests."""
        return self._outstanding[worker]

    def last_given(self, worker: str) -> int:
        """The turn at which the worker was last given a request; 0 if it never was."""
        return self._last_given.get(worker, 0)


class RoutingPolicy(Protocol):
    """Chooses among `candidates` (all routable). Returns a lease, or None to assign nobody."""

    def choose(self, request: AssignRequest, candidates: Sequence[Presence], ledger: Ledger) -> str | None: ...


class LeastOutstandingTokens:
    """Spread by load: the worker with the fewest outstanding tokens, among equals the one longest without a request."""

    def choose(self, request: AssignRequest, candidates: Sequence[Presence], ledger: Ledger) -> str | None:
        """Leases in `request.avoid` are taken only if there is nobody else."""
        if not candidates:
            return None
        avoid = frozenset(request.avoid)
        best = min(
            candidates,
            key=lambda p: (
                p.lease in avoid,
                ledger.outstanding(p.lease),
                ledger.last_given(p.lease),
                p.watcher,
                p.lease,
            ),
        )
        return best.lease
