"""What is compared: the router's policies, and policies that are not offered, for reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from dynamo_local.core.messages.presence import Load, Presence
from dynamo_local.core.messages.routing import AssignRequest, WeighedWorker
from dynamo_local.core.ports import CacheChanges
from dynamo_local.core.routing.ledger import Ledger
from dynamo_local.core.routing.policies import POLICIES, RoutingChoice, RoutingPolicy, cached_tokens, weighed
from dynamo_local.sim.requests import Arrival
from dynamo_local.sim.routers import Placement


@dataclass(frozen=True)
class Affinity:
    """The worker with most of the prefix, however busy; of equals, the one with the fewest requests."""

    needs_blocks: bool = True

    def choose(
        self, request: AssignRequest, candidates: Sequence[Presence], ledger: Ledger, now: float
    ) -> RoutingChoice | None:
        cached = cached_tokens(request, ledger)
        figures = [weighed(request, worker, ledger, cached, cost=-cached.get(worker.lease, 0)) for worker in candidates]
        return _lowest(figures, lambda each: (each.cost, each.requests, each.worker))


@dataclass(frozen=True)
class TokensTimesBatch:
    """LMetric (arXiv 2603.15202): tokens to compute times the number of requests, the new one included in both."""

    needs_blocks: bool = True

    def choose(
        self, request: AssignRequest, candidates: Sequence[Presence], ledger: Ledger, now: float
    ) -> RoutingChoice | None:
        cached = cached_tokens(request, ledger)
        figures = [weighed(request, worker, ledger, cached) for worker in candidates]
        costs = [replace(each, cost=(each.queued + each.uncached) * (each.requests + 1.0)) for each in figures]
        return _lowest(costs, lambda each: (each.cost, each.requests, each.worker))


@dataclass(frozen=True)
class StickyUntilBehind:
    """llm-d's default of August 2026: the worker with most of the prefix, if it has at least `share` of it and is not
    behind the least busy one by more than `behind` tokens to compute; else the one with the least to compute."""

    share: float = 0.8
    behind: int = 16_384
    needs_blocks: bool = True

    def choose(
        self, request: AssignRequest, candidates: Sequence[Presence], ledger: Ledger, now: float
    ) -> RoutingChoice | None:
        cached = cached_tokens(request, ledger)
        figures = [weighed(request, worker, ledger, cached) for worker in candidates]
        least = min(each.queued for each in figures)
        warm = [
            each
            for each in figures
            if each.cached >= self.share * request.tokens and each.queued - least <= self.behind
        ]
        costs = [replace(each, cost=float(each.queued + each.uncached)) for each in warm or figures]
        return _lowest(costs, lambda each: (each.cost, each.requests, each.worker), figures)


def _lowest(
    allowed: Sequence[WeighedWorker],
    order: Callable[[WeighedWorker], tuple[float, int, str]],
    all_of_them: Sequence[WeighedWorker] = (),
) -> RoutingChoice | None:
    if not allowed:
        return None
    best = min(allowed, key=order)
    most = max(all_of_them or allowed, key=lambda each: (each.cached, -each.queued, each.worker))
    return RoutingChoice(best.worker, best.cached, most.worker if most.cached > best.cached else None, tuple(allowed))


class Partitioned:
    """A router that knows the groups of a workload, and gives each a worker."""

    def __init__(self, workers: Sequence[str], group_of: Callable[[Arrival], int]) -> None:
        self._workers = workers
        self._group_of = group_of

    def place(self, arrival: Arrival, now: float) -> Placement:
        return Placement(self._workers[self._group_of(arrival) % len(self._workers)])

    def first_token(self, arrival: Arrival) -> None:
        pass

    def ended(self, arrival: Arrival) -> None:
        pass

    def moved(self, arrival: Arrival, worker: str, tokens: int, now: float) -> None:
        pass

    needs_loads = False

    def reported(self, loads: Mapping[str, Load]) -> None:
        pass

    def cache_changed(self, worker: str, changes: CacheChanges) -> None:
        pass


ARMS: Mapping[str, Callable[[], RoutingPolicy]] = {
    **POLICIES,
    "lmetric": TokensTimesBatch,
    "sticky": StickyUntilBehind,
    "affinity": Affinity,
}
"""By name."""
