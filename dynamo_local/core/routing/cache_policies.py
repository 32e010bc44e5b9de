"""Policies that send requests to where their prefix is cached, unless that hurts. Pure.

All count in tokens to compute: those of the request that a worker lacks, and those that it has to compute before. Work
that is done already (decoding) counts by the tokens of the contexts that it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.messages.routing import AssignRequest
from dynamo_local.core.routing.block_keys import KEY_BYTES
from dynamo_local.core.routing.choice import CandidateCost, RoutingChoice, cached_tokens, lot, not_avoided, weighed
from dynamo_local.core.routing.ledger import Ledger

_OWN_WEIGHT = 2.0
"""What a token that the request itself lacks weighs against one that is queued before it: computing a prefix once more
delays all, waiting for it only one."""

_CONTEXT_WEIGHT = 0.25
"""What a token of context that is read at each step weighs against a token to compute."""


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
        cached = cached_tokens(request, ledger)
        figures = [weighed(request, worker, ledger, cached) for worker in candidates]
        return _cheapest(request, candidates, [replace(each, cost=self._cost(each, ledger)) for each in figures])

    def _cost(self, worker: CandidateCost, ledger: Ledger) -> float:
        contexts = ledger.outstanding(worker.worker) - worker.queued
        return self.own_weight * worker.uncached + worker.queued + self.context_weight * contexts


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
        return _cheapest(request, candidates, costs)


def _cheapest(
    request: AssignRequest, candidates: Sequence[Presence], costs: Sequence[CandidateCost]
) -> RoutingChoice | None:
    if not candidates:
        return None
    of_worker = {each.worker: each for each in costs}
    allowed = not_avoided(request, candidates)
    lowest = min(of_worker[worker.lease].cost for worker in allowed)
    equals = [worker for worker in allowed if of_worker[worker.lease].cost == lowest]
    seed = request.blocks[:KEY_BYTES].hex() or request.request_id
    drawn = min(equals, key=lambda worker: (lot(seed, worker), worker.watcher, worker.lease))
    best = of_worker[drawn.lease]
    return RoutingChoice(best.worker, best.cached, _holder(best, costs), tuple(costs))


def _holder(chosen: CandidateCost, costs: Sequence[CandidateCost]) -> str | None:
    """The worker with the most of the prefix, if that is more than the chosen one has; of equals, the least busy."""
    most = max(costs, key=lambda each: (each.cached, -each.queued, -each.requests, each.worker))
    return most.worker if most.cached > chosen.cached else None
