"""`dynamo describe`: everything that is known of one watcher, one endpoint, or one live request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from dynamo_local.core.errors import BusError, DecodeError, GraphError, SupervisorError, UsageError
from dynamo_local.core.messages.endpoints import BoardRevision, EndpointView
from dynamo_local.core.messages.events import Event
from dynamo_local.core.messages.presence import Counts, EngineInfo, Load
from dynamo_local.core.names import LOCAL_NODE, MACHINERY, endpoint_of, short_watcher
from dynamo_local.sdk.config.resolved import ResolvedGraph
from dynamo_local.supervisor.admin.connect import bus_of
from dynamo_local.supervisor.admin.requests import RequestLine, list_requests
from dynamo_local.supervisor.admin.status import Row, list_watchers, presences
from dynamo_local.supervisor.places.far import places_of_graph
from dynamo_local.supervisor.server.reports.event_log import EventReader
from dynamo_local.supervisor.server.reports.logs import tail
from state.endpoints.board import read_board
from state.machine.processes import command_name, descendants
from state.paths import StatePaths

_ALL = 2**31
_LOG_LINES = 2000
"""Last lines of a log that are searched for errors."""

_SHOWN = 5
_ERROR_MARKS = (" ERROR ", " CRITICAL ", "error: ", "[ERR]", "[FTL]")


class WatcherDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A watcher and its process. None: not known, or the process has no such part. Times are seconds."""

    watcher: str
    component: str
    role: str
    revision: str = ""
    """The endpoint's revision that it serves; empty for the graph's own processes."""
    state: str
    detail: str
    pid: int | None
    children: tuple[str, ...]
    """Processes below it: pid and name."""
    devices: tuple[int, ...]
    age_s: float | None
    """Since the process started."""
    starts: int
    """Processes of the watcher since the server started."""
    deaths: tuple[Event, ...]
    """The last of its processes that ended without being told to, since the server started."""
    url: str | None
    engine: EngineInfo | None
    load: Load | None
    counts: Counts | None
    requests: int | None
    """Requests that the worker has."""
    leaving: int | None
    """Number of the worker's requests that are migrating to another worker."""
    arriving: int | None
    """Requests of other workers that are migrating to this one."""
    config: dict[str, Any]
    """The configuration of the service, with secrets masked."""
    log: str
    errors: tuple[str, ...]
    """The last error lines of the log."""


class EndpointDescription(msgspec.Struct, frozen=True, kw_only=True):
    """An endpoint: what was ordered, its state, its revisions and their workers. None: not known."""

    endpoint: EndpointView
    revisions: tuple[BoardRevision, ...]
    workers: tuple[Row, ...]
    requests: int | None
    """Requests for it that are under way."""
    events: tuple[Event, ...]
    """The last events of the endpoint since the server started."""


async def describe(paths: StatePaths, name: str) -> WatcherDescription | EndpointDescription | RequestLine:
    """Describe the watcher of that name, with or without its namespace, or else the endpoint of that name, or else the
    live request whose id begins so.

    Raises UsageError if there is none, or if several requests begin so; NotRunningError without a server.
    """
    rows, board = await list_watchers(paths), await asyncio.to_thread(read_board, paths)
    row = next((row for row in rows if name in (row.watcher, short_watcher(row.watcher))), None)
    views = () if board is None else board.endpoints
    view = next((view for view in views if row is None and view.spec.name == name), None)
    try:
        requests = (await list_requests(paths, _ALL)).requests
    except (BusError, DecodeError):
        # A watcher can be described without the bus, or while a frontend does not answer; an endpoint, too.
        if row is None and view is None:
            raise
        requests = None
    if row is not None:
        return await _describe_watcher(paths, row, requests)
    if view is not None and board is not None:
        return await _describe_endpoint(paths, view, board.revisions, rows, requests)
    return request_named(name, requests or (), rows, [view.spec.name for view in views])


async def _describe_endpoint(
    paths: StatePaths,
    view: EndpointView,
    revisions: Sequence[BoardRevision],
    rows: Sequence[Row],
    requests: Sequence[RequestLine] | None,
) -> EndpointDescription:
    name = view.spec.name
    events = await asyncio.to_thread(lambda: since_start(EventReader(paths.events_file).all()))
    return EndpointDescription(
        endpoint=view,
        revisions=tuple(each for each in revisions if endpoint_of(each.revision) == name),
        workers=tuple(row for row in rows if row.endpoint == name),
        requests=None if requests is None else sum(line.endpoint == name for line in requests),
        events=tuple(event for event in events if event.endpoint == name)[-_SHOWN:],
    )


def request_named(
    name: str, requests: Sequence[RequestLine], rows: Sequence[Row], endpoints: Sequence[str] = ()
) -> RequestLine:
    """Return the request whose id begins so. Pure. Raises UsageError for none and for several."""
    found = {line.request: line for line in requests if name and line.request.startswith(name)}
    if not found:
        watchers = ", ".join(short_watcher(row.watcher) for row in rows)
        others = f", and the endpoints {', '.join(endpoints)}" if endpoints else ""
        raise UsageError(
            f"there is no watcher{', no endpoint' if endpoints else ''} and no live request {name!r}",
            f"there are the watchers {watchers}{others}; `dynamo requests` shows requests",
        )
    if len(found) > 1:
        first, second, *_ = sorted(found)
        raise UsageError(f"{name!r} means {len(found)} requests", f"it may be {first} or {second}")
    return next(iter(found.values()))


async def _describe_watcher(paths: StatePaths, row: Row, requests: Sequence[RequestLine] | None) -> WatcherDescription:
    heard = {} if row.component in MACHINERY or row.pid is None else (await presences(paths, [row.watcher]))[0]
    presence = heard.get(row.watcher)
    events = await asyncio.to_thread(events_of, EventReader(paths.events_file).all(), row.watcher)
    deaths = tuple(event for event in events if event.kind == "death")
    log = paths.log_file(row.watcher)
    known = None if requests is None else [line for line in requests if line.worker == row.watcher]
    started_at = presence.started_at if presence is not None else None
    return WatcherDescription(
        watcher=row.watcher,
        component=row.component,
        role=row.role,
        revision=row.revision,
        state=row.state,
        detail=row.detail,
        pid=row.pid,
        children=() if row.pid is None or row.node != LOCAL_NODE else await asyncio.to_thread(_children, row.pid),
        devices=row.devices,
        age_s=None if started_at is None else max(0.0, time.monotonic() - started_at),
        starts=sum(event.what == "started" for event in events),
        deaths=deaths[-_SHOWN:],
        url=row.url,
        engine=presence.engine if presence is not None else None,
        load=row.load,
        counts=presence.counts if presence is not None else None,
        requests=None if known is None else len(known),
        leaving=None if known is None else sum(line.moving_to is not None for line in known),
        arriving=None if requests is None else sum(line.moving_to == row.watcher for line in requests),
        config=await asyncio.to_thread(_config, paths.graph_of(row.revision), row.component),
        log=str(log) if row.node == LOCAL_NODE else f"on node {row.node}: `dynamo logs {short_watcher(row.watcher)}`",
        errors=await _errors_of(paths, row),
    )


def events_of(events: Sequence[Event], watcher: str) -> list[Event]:
    """Return the events of a watcher since the last start of the server. Pure."""
    return [event for event in since_start(events) if event.watcher == watcher]


def since_start(events: Sequence[Event]) -> Sequence[Event]:
    """Return the events since the last start of the server. Pure."""
    starts = [index for index, event in enumerate(events) if event.kind == "server" and event.what.startswith("start")]
    return events[starts[-1] if starts else 0 :]


def _children(pid: int) -> tuple[str, ...]:
    return tuple(f"{child} {command_name(child)}" for child in sorted(descendants(pid) - {pid}))


def _config(graph_file: Path, component: str) -> dict[str, Any]:
    try:
        graph = ResolvedGraph.from_json(graph_file.read_bytes())
        return dict(graph.redacted().service(component).config)
    except (OSError, DecodeError, GraphError):
        return {}


async def _errors_of(paths: StatePaths, row: Row) -> tuple[str, ...]:
    """The last error lines of the watcher's log. None of a node that does not answer."""
    lines: Sequence[str] = ()
    if row.node == LOCAL_NODE:
        lines = await asyncio.to_thread(tail, paths.log_file(row.watcher), _LOG_LINES)
    else:
        with suppress(BusError, SupervisorError):
            async with bus_of(paths, "describe") as bus:
                lines = (await places_of_graph(bus, paths).log(row.watcher, _LOG_LINES)).lines
    return tuple(line for line in lines if any(mark in line for mark in _ERROR_MARKS))[-_SHOWN:]
