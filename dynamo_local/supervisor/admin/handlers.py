"""Answers questions and orders of the control API about what runs and what it does: each by a handler, those about live
settings, prefill queues and routes from here."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

import msgspec

from dynamo_local.bus.jetstream.live_settings import read_settings, write_setting
from dynamo_local.bus.jetstream.prefill_queue import PrefillQueue, QueuedJob
from dynamo_local.bus.jetstream.streams import StreamAbsentError
from dynamo_local.control.answers import JobRow, QueueView, SettingRow, same_fields
from dynamo_local.control.descriptions import RouteLine, RoutesView
from dynamo_local.control.operations import (
    CHANGE_ROLE,
    DESCRIBE,
    LIST_REQUESTS,
    LIST_ROUTES,
    LIST_SETTINGS,
    LIST_WORKERS,
    LOOK,
    MIGRATE,
    PURGE_QUEUE,
    READ_QUEUE,
    SET_SETTING,
    Call,
    Handlers,
)
from dynamo_local.core.errors import DecodeError, NotRunningError, QueueAbsentError, UsageError
from dynamo_local.core.fleet.view import ROUTER_ROLE
from dynamo_local.core.live_settings import SETTINGS, LiveSetting, setting
from dynamo_local.core.messages.reports import Event
from dynamo_local.core.messages.routing import RouteRow, RoutesAnswer, RoutesQuestion
from dynamo_local.core.names import FIRST_OF_MAIN, endpoint_of
from dynamo_local.core.request.log import told_id
from dynamo_local.core.routing.explanation import explained
from dynamo_local.core.subjects import Subjects
from dynamo_local.sdk.config.resolved import ResolvedGraph
from dynamo_local.supervisor.admin.asked import AskedServer, ask, known_revisions
from dynamo_local.supervisor.admin.describe import describe
from dynamo_local.supervisor.admin.requests import MigrationWish, list_requests, look, migrate
from dynamo_local.supervisor.admin.watchers import RoleWish, change_role, devices_of_others, list_watchers
from state.paths import StatePaths

SET, CONFIGURED, DEFAULT = "set", "configuration", "default"
_ANSWER_WITHIN_S = 5.0


def admin_handlers(server: AskedServer) -> Handlers:
    """Return what answers from the start on: what is not known yet is said so."""

    async def list_workers(call: Call) -> dict[str, Any]:
        others = {"held_by_others": await devices_of_others(server)} if call.flag("others") else {}
        return {**await _listed(list_watchers(server)), **others}

    async def take_role(call: Call) -> dict[str, str]:
        watcher, wish = call.names["watcher"], call.content(RoleWish)
        return {"watcher": watcher, "role": await change_role(server, watcher, wish)}

    async def purge(call: Call) -> dict[str, int]:
        return {"dropped": await purge_queue(server, call.query.get("endpoint"))}

    return {
        LIST_WORKERS: list_workers,
        CHANGE_ROLE: take_role,
        LOOK: lambda _: server.look(),
        DESCRIBE: lambda call: describe(server, call.names["name"]),
        LIST_REQUESTS: lambda call: list_requests(
            server, call.number("limit", 100), call.query.get("worker"), call.query.get("endpoint")
        ),
        MIGRATE: lambda call: _listed(migrate(server, call.content(MigrationWish))),
        READ_QUEUE: lambda call: read_queue(server, call.number("limit", 100), call.query.get("endpoint")),
        PURGE_QUEUE: purge,
        LIST_ROUTES: lambda call: list_routes(
            server, call.number("limit", 20), call.query.get("request"), call.query.get("endpoint")
        ),
        LIST_SETTINGS: lambda _: _listed(list_settings(server)),
        SET_SETTING: lambda call: set_value(server, call.names["key"], str(call.fields(("value",)).get("value", ""))),
    }


async def _listed(rows: Awaitable[Sequence[Any]]) -> dict[str, Any]:
    return {"object": "list", "data": await rows}


async def list_settings(server: AskedServer) -> list[SettingRow]:
    """Read all settings. Raises SupervisorError, BusError."""
    try:
        stored = await read_settings(await server.bus(), Subjects(server.paths.namespace))
    except StreamAbsentError:
        # The server could not create the settings, and has reported that: none can have been set.
        stored = {}
    graph = await asyncio.to_thread(_graph, server.paths)
    return [setting_row(known, stored, graph) for known in SETTINGS.values()]


async def set_value(server: AskedServer, key: str, text: str) -> SettingRow:
    """Change a setting. Raises UsageError for an unknown key or a bad value, SupervisorError, BusError."""
    known, namespace = setting(key), server.paths.namespace
    value = known.parse(text)
    try:
        await write_setting(await server.bus(), Subjects(namespace), key, value)
    except StreamAbsentError as error:
        raise NotRunningError(
            f"the server in namespace {namespace} has no live settings",
            "the first lines of `dynamo serve` tell why",
        ) from error
    server.record(Event("setting", f"{known.name} is {value}", "`dynamo config set`"))
    return SettingRow(known.name, value, SET, known.help)


def setting_row(known: LiveSetting, stored: dict[str, int], graph: ResolvedGraph | None) -> SettingRow:
    """The value of a setting: the one that was set, else the graph's configuration, else the default."""
    if known.name in stored:
        return SettingRow(known.name, stored[known.name], SET, known.help)
    for service in reversed(graph.services if graph is not None else ()):
        configured = service.config.get(known.name)
        if isinstance(configured, int):
            return SettingRow(known.name, int(configured), CONFIGURED, known.help)
    return SettingRow(known.name, known.default, DEFAULT, known.help)


def _graph(paths: StatePaths) -> ResolvedGraph | None:
    """The graph that the server runs; None if the server is just ending."""
    try:
        return ResolvedGraph.from_json(paths.graph_file.read_bytes())
    except (OSError, DecodeError):
        return None


async def read_queue(server: AskedServer, limit: int, endpoint: str | None = None) -> QueueView:
    """Read the length and the `limit` oldest jobs of all queues, or of one endpoint's.

    Raises NotRunningError when there is no queue, UsageError for what is no endpoint, SupervisorError, BusError.
    """
    queues = await _queues_of(server, endpoint)
    read = [await _rows(queue, limit, revision) for revision, queue in queues.items()]
    lengths = [await queue.length() for queue in queues.values()]
    return QueueView(
        namespace=server.paths.namespace,
        waiting=sum(length.waiting for length in lengths),
        in_hand=sum(length.in_hand for length in lengths),
        # Not sorted: within a queue the order is the queue's, however exact the ages are.
        jobs=tuple(heapq.merge(*read, key=lambda job: -job.age_s))[:limit],
    )


async def purge_queue(server: AskedServer, endpoint: str | None = None) -> int:
    """Drop all jobs, or those of an endpoint, and return their number. Raises as `read_queue`."""
    return sum([await queue.purge() for queue in (await _queues_of(server, endpoint)).values()])


async def _rows(queue: PrefillQueue, limit: int, revision: str) -> list[JobRow]:
    jobs = await queue.jobs(limit)
    return [job_row(queued, revision) for queued in jobs]


def job_row(queued: QueuedJob, revision: str) -> JobRow:
    """Make the row of a job in the queue of this revision."""
    state, age_s = "in hand" if queued.taken else "waiting", round(queued.age_s, 3)
    known: dict[str, Any] = {"state": state, "age_s": age_s, "endpoint": endpoint_of(revision), "revision": revision}
    if queued.job is not None:
        expires_in_s = round(queued.job.valid_s - queued.age_s, 3)
        known = {**same_fields(queued.job, JobRow), **known, "expires_in_s": expires_in_s}
    return JobRow(**known)


async def _queues_of(server: AskedServer, endpoint: str | None) -> dict[str, PrefillQueue]:
    """The queues that there are, by revision."""
    bus, namespace = await server.bus(), server.paths.namespace
    revisions = known_revisions([FIRST_OF_MAIN], await server.board(), endpoint)
    queues = {revision: PrefillQueue(bus, Subjects(namespace, revision)) for revision in revisions}
    found = {revision: queue for revision, queue in queues.items() if await _exists(queue)}
    if not found:
        whose = f"namespace {namespace}" if endpoint is None else f"endpoint {endpoint}"
        raise NotRunningError(
            f"{whose} has no prefill queue", "there is one for a graph or an endpoint with prefill workers"
        )
    return found


async def _exists(queue: PrefillQueue) -> bool:
    try:
        await queue.length()
    except QueueAbsentError:
        return False
    return True


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
