"""The ledger: which requests each worker has, and what they are to it. Pure.

Load is counted in tokens: the *outstanding* tokens of the requests that a worker has and has not finished, and those
among them that it has still to compute (*uncached*). The ledger knows them at once, while the workers' own reports are
always a little old: a burst of requests between two reports is spread as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dynamo_local.core.messages.routing import Charge
from dynamo_local.core.routing.caches.index import PrefixIndex, number_of

NEVER = 0
"""Number of no assignment."""


@dataclass(frozen=True)
class _Charge:
    worker: str
    tokens: int
    uncached: int
    at: float
    """When it was assigned, by this process's clock (s)."""
    order: int
    blocks: bytes


class Ledger:
    """The unfinished requests of each worker, and their tokens. Requests are identified by (frontend, request id)."""

    def __init__(self, index: PrefixIndex | None = None) -> None:
        """`index` is told which blocks come to workers."""
        self.index = PrefixIndex() if index is None else index
        self._charges: dict[tuple[str, str], _Charge] = {}
        self._outstanding: Counter[str] = Counter()
        self._uncached: Counter[str] = Counter()
        self._requests: Counter[str] = Counter()
        self._last_assigned: dict[str, int] = {}
        self._order = NEVER
        """Highest number of an assignment that was heard of."""

    def charge(
        self,
        frontend: str,
        request_id: str,
        worker: str,
        tokens: int,
        now: float = 0.0,
        *,
        uncached: int | None = None,
        blocks: bytes = b"",
        order: int | None = None,
    ) -> int:
        """Enter an assignment that was made at `now`, perhaps by another router, of which this one hears later. An
        earlier one of the same request is replaced: a request has one owner. Returns its number.

        `uncached`: tokens that the worker has to compute; None: all. `blocks`: keys of the context's full blocks,
        packed. `order`: number of the assignment, if it has one (Charge); otherwise it gets the next. Raises
        DecodeError if the blocks are none.
        """
        number = number_of(blocks)
        self.release(frontend, request_id)
        order = self._order + 1 if order is None else order
        charge = _Charge(worker, tokens, tokens if uncached is None else uncached, now, order, blocks)
        self._charges[frontend, request_id] = charge
        self._outstanding[worker] += tokens
        self._uncached[worker] += charge.uncached
        self._requests[worker] += 1
        self._order = max(self._order, order)
        self._last_assigned[worker] = max(self.last_assigned(worker), order)
        if number:
            self.index.expect(worker, blocks)
        return order

    def prefilled(self, frontend: str, request_id: str) -> None:
        """Note that a request's first token has come. Unknown requests are ignored."""
        charge = self._charges.get((frontend, request_id))
        if charge is not None:
            self._uncached[charge.worker] -= charge.uncached
            self._charges[frontend, request_id] = replace(charge, uncached=0)

    def release(self, frontend: str, request_id: str) -> None:
        """Remove a request that has finished or left its worker. Unknown requests are ignored."""
        charge = self._charges.pop((frontend, request_id), None)
        if charge is None:
            return
        self._outstanding[charge.worker] -= charge.tokens
        self._uncached[charge.worker] -= charge.uncached
        self._requests[charge.worker] -= 1
        if charge.blocks:
            self.index.expect_no_more(charge.worker, charge.blocks)

    @property
    def charged(self) -> Counter[str]:
        """Number of charged requests, by frontend."""
        return Counter(frontend for frontend, _ in self._charges)

    def of_frontend(self, frontend: str, now: float = 0.0) -> tuple[Charge, ...]:
        """All charges of a frontend's requests, as they are at `now`."""
        return tuple(
            Charge(
                *(request_id, charge.worker, charge.tokens, charge.uncached),
                age_s=max(now - charge.at, 0.0),
                order=charge.order,
            )
            for (owner, request_id), charge in self._charges.items()
            if owner == frontend
        )

    def take_over(self, frontend: str, charge: Charge, now: float = 0.0, blocks: bytes = b"") -> None:
        """Enter an assignment that another router has made, and that is heard of at `now`. Raises DecodeError if
        `blocks` are no keys."""
        known = self._charges.get((frontend, charge.request_id))
        if known is None or (known.worker, known.tokens, known.order) != (charge.worker, charge.tokens, charge.order):
            self.charge(
                *(frontend, charge.request_id, charge.worker, charge.tokens, now - charge.age_s),
                uncached=charge.uncached,
                blocks=blocks,
                order=charge.order,
            )

    def settle(self, frontend: str, charges: Sequence[Charge], since: float, now: float = 0.0) -> None:
        """Replace the charges of a frontend by its own account, which may lack those made after `since`."""
        told = {charge.request_id for charge in charges}
        for key in [key for key, charge in self._charges.items() if key[0] == frontend and charge.at < since]:
            if key[1] not in told:
                self.release(*key)
        for charge in charges:
            known = self._charges.get((frontend, charge.request_id))
            if known is None or (known.worker, known.tokens) != (charge.worker, charge.tokens):
                self.take_over(frontend, charge, now)
            elif charge.uncached == 0:
                self.prefilled(frontend, charge.request_id)

    def forget_frontend(self, frontend: str) -> None:
        """Release all requests of a frontend that is gone."""
        for owner, request_id in [key for key in self._charges if key[0] == frontend]:
            self.release(owner, request_id)

    def forget_worker(self, worker: str) -> None:
        """Drop all charges of a worker that is gone."""
        for owner, request_id in [key for key, charge in self._charges.items() if charge.worker == worker]:
            self.release(owner, request_id)
        for account in (self._outstanding, self._uncached, self._requests, self._last_assigned):
            account.pop(worker, None)

    def outstanding(self, worker: str) -> int:
        """Outstanding tokens of a worker."""
        return self._outstanding[worker]

    def uncached(self, worker: str) -> int:
        """Tokens of contexts that the worker has still to compute."""
        return self._uncached[worker]

    def requests(self, worker: str) -> int:
        """Number of requests that a worker has."""
        return self._requests[worker]

    def since(self, worker: str, at: float) -> tuple[int, int]:
        """Tokens and number of a worker's requests that were charged after this time."""
        young = [each.tokens for each in self._charges.values() if each.worker == worker and each.at > at]
        return sum(young), len(young)

    def last_assigned(self, worker: str) -> int:
        """Number of the worker's last assignment; `NEVER` if it had none. It does not matter when this ledger heard of
        it: all that hear the same agree."""
        return self._last_assigned.get(worker, NEVER)
