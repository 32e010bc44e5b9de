"""The routing policies, a policy's choice, and what it is made from. Pure."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Final, Protocol

from msgspec.structs import replace

from dynamo_local.core.fleet.freeness import Usage, freeness, instance_of
from dynamo_local.core.fleet.rates import compared
from dynamo_local.core.messages.presence import EngineRates, Presence
from dynamo_local.core.messages.routing import AssignRequest, WeighedWorker
from dynamo_local.core.routing.caches.index import KEY_BYTES, number_of
from dynamo_local.core.routing.ledger import Ledger
from dynamo_local.core.routing.pulling import PULL_TO_COMPUTE, is_worth_pulling

# A routing policy's choice, and what it is made from. Pure.

_64_BITS = (1 << 64) - 1
_MIXER = 0x9E37_79B9_7F4A_7C15


@dataclass(frozen=True)
class RoutingChoice:
    """The worker for a request. `cached`: leading tokens of the context that it is expected to have; None: not known.
    `pull_from`: worker with more of them. `costs`: those of all candidates, in their order."""

    worker: str
    cached: int | None = None
    pull_from: str | None = None
    costs: tuple[WeighedWorker, ...] = ()


class RoutingPolicy(Protocol):
    """Chooses a worker. Alike in every router that knows the same: the order of the candidates does not matter."""

    @property
    def needs_blocks(self) -> bool:
        """Whether requests are to say which blocks their contexts have."""

    def choose(
        self, request: AssignRequest, candidates: Sequence[Presence], ledger: Ledger, now: float
    ) -> RoutingChoice | None:
        """Choose from workers that are all routable. None if there are none. `now`: CLOCK_MONOTONIC, in seconds.

        Workers in `request.avoid` are chosen only if there is no other. Raises DecodeError if `request.blocks` are no
        keys.
        """


def not_avoided(request: AssignRequest, candidates: Sequence[Presence]) -> Sequence[Presence]:
    """The candidates that have not just failed the request; all if there are no others."""
    return [each for each in candidates if each.lease not in request.avoid] or candidates


def lot(text: str, worker: Presence) -> int:
    """A number that is alike in every process and otherwise as if drawn by lot, for a text and a worker."""
    mixed = (_digest(text) ^ _digest(worker.lease)) * _MIXER & _64_BITS
    return (mixed ^ mixed >> 32) * _MIXER & _64_BITS


def cached_tokens(request: AssignRequest, ledger: Ledger) -> Mapping[str, int]:
    """Leading tokens of the context that each worker need not compute, by lease; workers with none are left out.

    A whole context is never cached: the last token is computed in any case.
    """
    if request.block_tokens < 1:
        return {}
    most = max((request.tokens - 1) // request.block_tokens, 0)
    known = min(number_of(request.blocks), most)
    found = ledger.index.cached(request.blocks[: known * KEY_BYTES])
    return {worker: blocks * request.block_tokens for worker, blocks in found.items()}


def weighed(
    request: AssignRequest, worker: Presence, ledger: Ledger, cached: Mapping[str, int], cost: float = 0.0
) -> WeighedWorker:
    """The figures of one candidate."""
    has = cached.get(worker.lease, 0)
    # What the worker gave up for want of room, it computes again before it computes what comes now.
    recomputed = 0 if worker.load is None else worker.load.preempted_tokens or 0
    queued, requests = ledger.uncached(worker.lease) + recomputed, ledger.requests(worker.lease)
    return WeighedWorker(worker.lease, cost, has, max(request.tokens - has, 0), queued, requests)


@lru_cache(maxsize=4_096)
def _digest(text: str) -> int:
    """Kept, because leases are asked for again and again."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


# The policy that sends a request to where its first token is expected first. Pure.

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


# Policies that look at workers' load, or at nothing, and not at what they have cached. Pure.


class _ByLoad(ABC):
    """Chooses the worker of the lowest cost; of equals, the one that was assigned longest ago."""

    needs_blocks = False

    def choose(
        self, request: AssignRequest, candidates: Sequence[Presence], ledger: Ledger, now: float
    ) -> RoutingChoice | None:
        if not candidates:
            return None
        costs = {worker.lease: self._cost(request, worker, ledger, now) for worker in candidates}
        best = min(
            not_avoided(request, candidates),
            key=lambda worker: (costs[worker.lease], ledger.last_assigned(worker.lease), worker.watcher, worker.lease),
        )
        figures = [weighed(request, each, ledger, {}, costs[each.lease]) for each in candidates]
        return RoutingChoice(best.lease, costs=tuple(figures))

    @abstractmethod
    def _cost(self, request: AssignRequest, worker: Presence, ledger: Ledger, now: float) -> float: ...


class LeastOutstandingTokens(_ByLoad):
    """Chooses the worker with the fewest outstanding tokens."""

    def _cost(self, request: AssignRequest, worker: Presence, ledger: Ledger, now: float) -> float:
        return ledger.outstanding(worker.lease)


class Freest(_ByLoad):
    """Chooses the worker with the highest freeness (core/fleet/freeness.py): Llumnix's dispatch.

    Requests assigned since a worker measured its load are added to it. A worker of unknown load comes last.
    """

    def _cost(self, request: AssignRequest, worker: Presence, ledger: Ledger, now: float) -> float:
        return -_freeness(worker, ledger, now)


class RoundRobin(_ByLoad):
    """Chooses the worker that was assigned longest ago."""

    def _cost(self, request: AssignRequest, worker: Presence, ledger: Ledger, now: float) -> float:
        return 0.0


class DrawnByLot(_ByLoad):
    """Chooses at random, with the request's id as seed: every router draws the same worker."""

    def _cost(self, request: AssignRequest, worker: Presence, ledger: Ledger, now: float) -> float:
        return lot(request.request_id, worker)


def _freeness(worker: Presence, ledger: Ledger, now: float) -> float:
    at = None if worker.load is None else worker.load.at
    tokens, requests = ledger.since(worker.lease, now if at is None else at)
    instance = instance_of(worker, now, Usage(tokens, requests=requests))
    return -math.inf if instance is None else freeness(instance)


# The policies by their names.

POLICIES: Mapping[str, Callable[[], RoutingPolicy]] = {
    "kv": SoonestFirstToken,
    "freeness": Freest,
    "least-loaded": LeastOutstandingTokens,
    "round-robin": RoundRobin,
    "random": DrawnByLot,
}

DEFAULT: Final = "kv"
