"""Policies that look at workers' load, or at nothing, and not at what they have cached. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from dynamo_local.core.fleet.freeness import Usage, freeness, instance_of
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.messages.routing import AssignRequest
from dynamo_local.core.routing.choice import RoutingChoice, lot, not_avoided, weighed
from dynamo_local.core.routing.ledger import Ledger


class LeastOutstandingTokens:
    """Chooses the worker with the fewest outstanding tokens; of equals, the one that was assigned longest ago."""

    needs_blocks = False

    def choose(
        self, request: AssignRequest, candidates: Sequence[Presence], ledger: Ledger, now: float
    ) -> RoutingChoice | None:
        return _cheapest(request, candidates, ledger, lambda worker: ledger.outstanding(worker.lease))


class Freest:
    """Chooses the worker with the highest freeness (core/fleet/freeness.py): Llumnix's dispatch.

    Requests assigned since a worker measured its load are added to it. A worker of unknown load comes last.
    """

    needs_blocks = False

    def choose(
        self, request: AssignRequest, candidates: Sequence[Presence], ledger: Ledger, now: float
    ) -> RoutingChoice | None:
        return _cheapest(request, candidates, ledger, lambda worker: -_freeness(worker, ledger, now))


class RoundRobin:
    """Chooses the worker that was assigned longest ago."""

    needs_blocks = False

    def choose(
        self, request: AssignRequest, candidates: Sequence[Presence], ledger: Ledger, now: float
    ) -> RoutingChoice | None:
        return _cheapest(request, candidates, ledger, lambda _: 0.0)


class DrawnByLot:
    """Chooses at random, with the request's id as seed: every router draws the same worker."""

    needs_blocks = False

    def choose(
        self, request: AssignRequest, candidates: Sequence[Presence], ledger: Ledger, now: float
    ) -> RoutingChoice | None:
        return _cheapest(request, candidates, ledger, lambda worker: lot(request.request_id, worker))


def _freeness(worker: Presence, ledger: Ledger, now: float) -> float:
    at = None if worker.load is None else worker.load.at
    tokens, requests = ledger.since(worker.lease, now if at is None else at)
    instance = instance_of(worker, now, Usage(tokens, requests=requests))
    return -math.inf if instance is None else freeness(instance)


def _cheapest(
    request: AssignRequest, candidates: Sequence[Presence], ledger: Ledger, cost: Callable[[Presence], float]
) -> RoutingChoice | None:
    if not candidates:
        return None
    costs = {worker.lease: cost(worker) for worker in candidates}
    best = min(
        not_avoided(request, candidates),
        key=lambda worker: (costs[worker.lease], ledger.last_assigned(worker.lease), worker.watcher, worker.lease),
    )
    figures = [weighed(request, each, ledger, {}, costs[each.lease]) for each in candidates]
    return RoutingChoice(best.lease, costs=tuple(figures))
