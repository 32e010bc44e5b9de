"""The policy that sends a request to where its first token is expected first. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from dynamo_local.core.fleet.rates import compared
from dynamo_local.core.messages.presence import EngineRates, Presence
from dynamo_local.core.messages.routes import WeighedWorker
from dynamo_local.core.messages.routing import AssignRequest
from dynamo_local.core.routing.caches.block_keys import KEY_BYTES
from dynamo_local.core.routing.choice import RoutingChoice, cached_tokens, lot, not_avoided, weighed
from dynamo_local.core.routing.ledger import Ledger
from dynamo_local.core.routing.pulling import PULL_TO_COMPUTE, is_worth_pulling

_QUEUED_WEIGHT, _QUEUED_WEIGHT_SHARED = 0.33, 0.75
"""What a token that is queued before a request weighs against one that the request itself lacks, if no other request
under way has its context, and if one has all of it. To compute a prefix once more delays all that come behind, and
takes room in a cache; to wait delays this request alone. What several ask for at once is worth having at several
workers. From simulation (docs/internals/results/routing.md)."""

_CONTEXT_WEIGHT = 0.0625
"""What a token of a context that is read at each step weighs against one to compute: requests that decode slow down not
only the first token. From the same simulation: with none, one worker gets too many of the streams of chats."""


class SoonestFirstToken:
    """Chooses the worker from which the first token is expected soonest, by the rates that workers have measured.

    cost = wait for a place + time for the queued prompts, and for what the request lacks + a step, in seconds

    What is worth pulling from the worker with most of the prefix counts as pulled. Of equals, the worker is drawn by
    lot, alike for one prefix.
    """

    needs_blocks = True

    def choose(
        self, request: AssignRequest, candidates: Sequence[Presence], ledger: Ledger, now: float
    ) -> RoutingChoice | None:
        if not candidates:
            return None
        cached, shared = cached_tokens(request, ledger), _shared_tokens(request, ledger)
        figures = [weighed(request, each, ledger, cached) for each in candidates]
        source = max(range(len(figures)), key=lambda index: _holds(figures[index]))
        most, holder = figures[source].cached, candidates[source]
        pulls = [
            is_worth_pulling(most - each.cached, holder, worker)
            for worker, each in zip(candidates, figures, strict=True)
        ]
        rates = compared([None if each.load is None else each.load.rates for each in candidates])
        # Idle workers are not told apart by a step: it is short, and measured on machines that do other things as well.
        step_s = min([each.step_s or 0.0 for each in rates])
        rates = [replace(each, step_s=step_s) for each in rates]
        weight = _QUEUED_WEIGHT + (_QUEUED_WEIGHT_SHARED - _QUEUED_WEIGHT) * shared / max(request.tokens, 1)
        costs = [
            # What requests under way have may not have been computed yet: a pull would wait for that.
            _expected(each, worker, its, ledger, weight, max(most - max(each.cached, shared), 0) if pull else 0)
            for each, worker, its, pull in zip(figures, candidates, rates, pulls, strict=True)
        ]
        best = _cheapest(request, candidates, costs)
        chosen = costs[best]
        return RoutingChoice(chosen.worker, chosen.cached, holder.lease if pulls[best] else None, tuple(costs))


def _expected(
    each: WeighedWorker, worker: Presence, rates: EngineRates, ledger: Ledger, queued_weight: float, pulled: int
) -> WeighedWorker:
    """The figures of a worker with its cost. `pulled`: tokens of the context that it would pull."""
    # Not `each.queued`: what is computed again is told late, and requests would swing between workers.
    queued = ledger.uncached(each.worker)
    contexts = ledger.outstanding(each.worker) - queued
    per_token, step_s, place_s, running = rates.prefill_s_per_token or 0.0, rates.step_s or 0.0, 0.0, each.requests
    if worker.engine is not None:
        places = max(worker.engine.max_num_seqs, 1)
        place_s = (rates.held_s or 0.0) * max(each.requests + 1 - places, 0) / places
        running = min(each.requests, places)
    prefill_s = (queued_weight * queued + each.uncached - (1 - PULL_TO_COMPUTE) * pulled) * per_token
    step_s += (rates.step_s_per_running or 0.0) * running + _CONTEXT_WEIGHT * contexts * per_token
    cost = place_s + prefill_s + step_s
    return replace(each, cost=cost, place_s=place_s, prefill_s=prefill_s, step_s=step_s)


def _shared_tokens(request: AssignRequest, ledger: Ledger) -> int:
    """Leading tokens of the context that requests under way have as well."""
    return min(ledger.index.under_way(request.blocks) * request.block_tokens, request.tokens)


def _cheapest(request: AssignRequest, candidates: Sequence[Presence], costs: Sequence[WeighedWorker]) -> int:
    """Index of the cheapest candidate."""
    allowed = {each.lease for each in not_avoided(request, candidates)}
    lowest = min([each.cost for each in costs if each.worker in allowed])
    equals = [index for index, each in enumerate(costs) if each.cost == lowest and each.worker in allowed]
    seed = request.blocks[:KEY_BYTES].hex() or request.request_id
    return min(equals, key=lambda index: (lot(seed, candidates[index]), costs[index].worker))


def _holds(each: WeighedWorker) -> tuple[int, int, int, str]:
    """Order of the workers from which a prefix can be pulled: by what they have of it, then by how busy they are."""
    return each.cached, -each.queued, -each.requests, each.worker
