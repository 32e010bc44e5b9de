"""Asks the routers for their latest assignments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from dynamo_local.control.descriptions import RouteLine, RoutesView
from dynamo_local.core.errors import UsageError
from dynamo_local.core.fleet.view import ROUTER_ROLE
from dynamo_local.core.messages.routes import RouteRow, RoutesAnswer, RoutesQuestion
from dynamo_local.core.names import endpoint_of
from dynamo_local.core.request.log import told_id
from dynamo_local.core.routing.explanation import explained
from dynamo_local.core.subjects import Subjects
from dynamo_local.supervisor.admin.asked import AskedServer
from dynamo_local.supervisor.admin.connect import ask
from dynamo_local.supervisor.admin.frontends import look

_ANSWER_WITHIN_S = 5.0


async def list_routes(
    server: AskedServer, limit: int, request: str | None = None, endpoint: str | None = None
) -> RoutesView:
    """List the `limit` latest assignments, or those of one request (the id that its client knows, or its beginning) or
    of one endpoint among them. Raises UsageError without a router or such an endpoint, SupervisorError, BusError."""
    bus = await server.bus()
    found, revisions = await look(server, endpoint)
    routers = {row.lease: row.watcher for row in found if row.role == ROUTER_ROLE and row.lease is not None}
    if not routers:
        raise UsageError("this server has no router", "its frontend sends requests to the worker with the least to do")
    names = {row.lease: row.watcher for row in found if row.lease is not None}
    question = RoutesQuestion(limit if request is None else 2**31, None if endpoint is None else tuple(revisions))
    # The subject is the graph's own: a router answers for all models.
    subjects = Subjects(server.paths.namespace)
    answers = [
        await ask(bus, watcher, subjects.routes(lease), question, RoutesAnswer, timeout_s=_ANSWER_WITHIN_S)
        for lease, watcher in routers.items()
    ]
    return view_of(answers, names, limit, request)


def view_of(
    answers: Sequence[RoutesAnswer], names: Mapping[str, str], limit: int, request: str | None = None
) -> RoutesView:
    """The answers of all routers as one. `names`: watchers by lease. Pure."""
    rows = sorted((row for answer in answers for row in answer.routes), key=lambda row: row.age_s)
    lines = [route_line(row, names) for row in rows if request is None or told_id(row.request_id).startswith(request)]
    return RoutesView(policy=answers[0].policy, routes=tuple(lines[:limit]))


def route_line(row: RouteRow, names: Mapping[str, str]) -> RouteLine:
    """An assignment with the names of workers, and the reason. A worker that is gone is named by its lease. Pure."""
    return RouteLine(
        request=told_id(row.request_id),
        endpoint=endpoint_of(row.revision),
        revision=row.revision,
        age_s=round(row.age_s, 3),
        **msgspec.structs.asdict(explained(row, lambda lease: names.get(lease, lease))),
    )
