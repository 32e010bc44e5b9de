"""The router service: assigns requests to workers by a routing policy (core/routing)."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Literal

from msgspec.structs import replace

from components.router.model_routing import Assignments, ModelRouting
from components.workers import VllmWorker
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core.errors import BusError
from dynamo_local.core.fleet.view import ROUTER_ROLE
from dynamo_local.core.messages.routing import (
    Account,
    Assignment,
    AssignRequest,
    Charged,
    Charges,
    RoutesAnswer,
    RoutesQuestion,
)
from dynamo_local.core.names import FIRST_OF_MAIN
from dynamo_local.core.routing.explanation import route_row
from dynamo_local.core.routing.policies import DEFAULT, POLICIES
from dynamo_local.core.subjects import Subjects
from dynamo_local.process.context import ServiceContext
from dynamo_local.sdk import Service, async_on_start, depends, service

_log = logging.getLogger(__name__)

_LOOK_EVERY_S = 10.0
_FORGET_AFTER_S = 60.0
"""Time for which a revision without any process is remembered."""


@dataclass(frozen=True)
class RouterSettings:
    """Keys of the router."""

    policy: Literal["kv", "freeness", "least-loaded", "round-robin", "random"] = field(
        default=DEFAULT,
        metadata={
            "help": "How a worker is chosen for a request. kv: where most of its prefix is cached, unless another has "
            "so much less to do that it answers earlier. freeness: the most free KV cache. least-loaded: the fewest "
            "tokens of unfinished requests. round-robin, random: whatever the load."
        },
    )


@dataclass(frozen=True)
class _Served:
    """A revision that is served. `works`: keep what is known of its workers up to date."""

    routing: ModelRouting
    beginning: asyncio.Task[None]
    works: tuple[asyncio.Task[None], ...]


@service(config=RouterSettings, role=ROUTER_ROLE)
class Router(Service):
    """Assigns requests to workers, and counts them as their load until they are released.

    The workers of each revision are kept apart: each has its own ledger.
    """

    workers = depends(VllmWorker)

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._policy = context.settings(RouterSettings).policy
        self._assignments = Assignments(self._policy)
        self._revisions: dict[str, _Served] = {}
        self._processes = FleetWatch(context.bus, context.subjects)
        """Those that serve no model of their own, the other routers among them."""

    @async_on_start
    async def start(self) -> None:
        """Listen. A restarted router starts with an empty ledger, and learns the load from the charges of frontends."""
        bus, context = self._context.bus, self._context
        self._note()
        await self._processes.start()
        context.tasks.spawn("processes", self._processes.run())
        await bus.serve(context.subjects.routes(context.lease), RoutesQuestion, self._on_routes)
        every = Subjects(context.namespace, "*")
        # In tasks: a revision that begins keeps no question of others waiting.
        await bus.serve_each(every.assign, AssignRequest, self._on_assign, queue=ROUTER_ROLE, tasks=context.tasks)
        await bus.listen_each(every.account, Account, self._on_account)
        context.tasks.spawn("revisions", self._forget())
        # So that its first request finds what workers have cached.
        self._serve(FIRST_OF_MAIN)

    async def _on_routes(self, question: RoutesQuestion) -> RoutesAnswer:
        """Of all models: an operator asks each router once."""
        return RoutesAnswer(self._policy, self._assignments.latest(question))

    async def _on_assign(self, revision: str, request: AssignRequest) -> Assignment:
        served = self._serve(revision)
        if not served.beginning.done():
            await asyncio.wait({served.beginning})
        return self._assign(served.routing, request)

    async def _on_account(self, revision: str, told: Account) -> None:
        # Begun by charges as well: the workers are known then when the next request comes.
        if revision in self._revisions or isinstance(told, Charged | Charges):
            self._serve(revision).routing.note(told)

    def _serve(self, revision: str) -> _Served:
        served = self._revisions.get(revision)
        if served is None:
            routing = self._routing(Subjects(self._context.namespace, revision))
            spawn = self._context.tasks.spawn
            beginning = spawn(f"{revision} begins", self._begin(revision, routing))
            works = tuple(spawn(f"{name} of {revision}", work) for name, work in routing.works())
            served = _Served(routing, beginning, works)
            self._revisions[revision] = served
        return served

    async def _begin(self, revision: str, routing: ModelRouting) -> None:
        try:
            await routing.start()
            await routing.heard()
        except BusError as error:
            _log.warning("the workers of %s cannot be heard, the next question tries again: %s", revision, error)
            await self._end(revision)

    async def _forget(self) -> None:
        """End the routing for revisions that are gone, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            gone = [name for name, one in self._revisions.items() if one.routing.empty_for_s() > _FORGET_AFTER_S]
            for revision in gone:
                await self._end(revision)

    async def _end(self, revision: str) -> None:
        served = self._revisions.pop(revision)
        for work in served.works:
            work.cancel()
        await served.routing.stop()
        self._note()

    def _routing(self, subjects: Subjects) -> ModelRouting:
        return ModelRouting(self._context.bus, subjects, POLICIES[self._policy](), self._note)

    def _assign(self, routing: ModelRouting, request: AssignRequest) -> Assignment:
        routed = routing.assign(request)
        self._assignments.add(request, routed, routing.subjects.revision)
        self._note()
        assignment = routed.assignment
        if assignment.worker is not None and self._has_others():
            assignment = replace(assignment, tell=True)
        if not request.explain:
            return assignment
        return replace(assignment, route=route_row(request, assignment, routed.costs))

    def _has_others(self) -> bool:
        """Whether there are further routers. They hear of an assignment by its frontend, which tells them of its end as
        well: in this order."""
        lease, processes = self._context.lease, self._processes.view.members()
        return any(each.role == ROUTER_ROLE and each.lease != lease for each in processes)

    def _note(self) -> None:
        """Have the counts published."""
        routings = [served.routing for served in self._revisions.values()]
        counts = self._assignments.counts(
            index_blocks=sum(routing.index_blocks for routing in routings),
            out_of_step=sum(routing.out_of_step for routing in routings),
        )
        self._context.announcer.note(counts=counts)
