"""Policies that send requests to where their prefix is cached, unless that hurts. Pure.

All count in tokens to compute: those of the request that a worker lacks, and those that it has to compute before. Work
that is done already (decoding) counts by the tokens of the contexts that it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.messages.routing import AssignRequest
from dynamo_local.core.routing.caches.block_keys import KEY_BYTES
from dynamo_local.core.routing.choice import CandidateCost, RoutingChoice, cached_tokens, lot, not_avoided, weighed
from dynamo_local.core.routing.ledger import Ledger

_OWN_WEIGHT = 4.0
"""What a token that the request itself lacks weighs against one that is queued before it: computing a prefix once more
delays all, waiting for it only one. From simulation (docs/internals/results/routing.md): with 2 too much is computed
again under load, with 8 streams stall in chats, where one worker gets too many of them."""

_CONTEXT_WEIGHT = 0.25
"""What a token of context that is read at each step weighs against one to compute. With 0.05 chats stall as well."""


@dataclass(frozen=True)
class CacheAndLoad:
    """Chooses the worker with the least to do, what the request itself lacks there included.

    cost = own weight x tokens of the request that are not cached + tokens queued + context weight x tokens of contexts

    So a request goes to the worker with most of its prefix until that one is behind another by a multiple of the tokens
    that the other would have to compute in addition. Of equals, the worker is drawn by lot, alike for one prefix.
    """

    own_weight: float = _OWN_WEIGHT
    context_weight: float = _CONTEXT_WEIGHT
    needs_blocks: bool = True

    def choose(
        self, request: AssignRequest, candidates: Sequence[Presence], ledger: Ledger, now: float
    ) -> RoutingChoice | None:
        return _cheapest(request, candidates, ledger, self._cost)

    def _cost(self, worker: str, uncached: int, ledger: Ledger) -> float:
        queued = ledger.uncached(worker)
        contexts = ledger.outstanding(worker) - queued
        return self.own_weight * uncached + queued + self.context_weight * contexts


@dataclass(frozen=True)
class TokensTimesBatch:
    """LMetric (arXiv 2603.15202): tokens to compute times the number of requests, the new one included in both."""

    needs_blocks: bool = True

    def choose(
        self, request: AssignRequest, candidates: Sequence[Presence], ledger: Ledger, now: float
    ) -> RoutingChoice | None:
        return _cheapest(request, candidates, ledger, self._cost)

    def _cost(self, worker: str, uncached: int, ledger: Ledger) -> float:
        return (ledger.uncached(worker) + uncached) * (ledger.requests(worker) + 1.0)


def _cheapest(
    request: AssignRequest,
    candidates: Sequence[Presence],
    ledger: Ledger,
    cost: Callable[[str, int, Ledger], float],
) -> RoutingChoice | None:
    """`cost`: of a worker that lacks so many tokens of the request."""
    if not candidates:
        return None
    cached, tokens = cached_tokens(request, ledger), request.tokens
    has = cached.get
    of_worker = {each.lease: cost(each.lease, max(tokens - has(each.lease, 0), 0), ledger) for each in candidates}
    best = _drawn(request, not_avoided(request, candidates), of_worker)
    costs = [weighed(request, each, ledger, cached, of_worker[each.lease]) for each in candidates]
    return RoutingChoice(best, has(best, 0), _holder(has(best, 0), costs), tuple(costs))


def _drawn(request: AssignRequest, allowed: Sequence[Presence], of_worker: Mapping[str, float]) -> str:
    """Of the cheapest workers, the one drawn by lot."""
    lowest = min([of_worker[worker.lease] for worker in allowed])
    equals = [worker for worker in allowed if of_worker[worker.lease] == lowest]
    if len(equals) == 1:
        return equals[0].lease
    seed = request.blocks[:KEY_BYTES].hex() or request.request_id
    return min(equals, key=lambda worker: (lot(seed, worker), worker.watcher, worker.lease)).lease


def _holder(cached: int, costs: Sequence[CandidateCost]) -> str | None:
    """The worker with the most of the prefix, if that is more than `cached`; of equals, the least busy."""
    more = [each for each in costs if each.cached > cached]
    if not more:
        return None
    return max(more, key=lambda each: (each.cached, -each.queued, -each.requests, each.worker)).worker
