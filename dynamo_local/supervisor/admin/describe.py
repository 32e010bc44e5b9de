"""Describes one watcher, one endpoint or one live request: everything that is known of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dynamo_local.control.answers import WatcherRow, same_fields
from dynamo_local.control.descriptions import Description, EndpointDescription, WatcherDescription
from dynamo_local.core.errors import BusError, DecodeError, GraphError, SupervisorError, UsageError
from dynamo_local.core.messages.admin import RequestLine
from dynamo_local.core.messages.endpoints import BoardRevision, EndpointView
from dynamo_local.core.messages.reports import Event
from dynamo_local.core.names import LOCAL_NODE, endpoint_of, short_watcher
from dynamo_local.sdk.config.resolved import ResolvedGraph
from dynamo_local.supervisor.admin.asked import AskedServer
from dynamo_local.supervisor.admin.requests import list_requests
from dynamo_local.supervisor.admin.watchers import list_watchers
from dynamo_local.supervisor.server.reports.event_log import EventReader
from dynamo_local.supervisor.server.reports.logs import tail
from state.machine.processes import command_name, descendants

_ALL = 2**31
_LOG_LINES = 2000
"""Last lines of a log that are searched for errors."""

_SHOWN = 5
_ERROR_MARKS = (" ERROR ", " CRITICAL ", "error: ", "[ERR]", "[FTL]")


async def describe(server: AskedServer, name: str) -> Description:
    """Describe the watcher of that name, with or without its namespace, or else the endpoint of that name, or else the
    live request whose id begins so.

    Raises UsageError if there is none, or if several requests begin so.
    """
    rows, board = await asyncio.gather(list_watchers(server), server.board())
    row = next((row for row in rows if name in (row.watcher, short_watcher(row.watcher))), None)
    views = () if board is None else board.endpoints
    view = next((view for view in views if row is None and view.spec.name == name), None)
    try:
        requests = (await list_requests(server, _ALL)).requests
    except (BusError, DecodeError, SupervisorError):
        # A watcher can be described without the bus, or while a frontend does not answer; an endpoint, too.
        if row is None and view is None:
            raise
        requests = None
    if row is not None:
        return Description(watcher=await _describe_watcher(server, row, requests))
    if view is not None and board is not None:
        return Description(endpoint=await _describe_endpoint(server, view, board.revisions, rows, requests))
    return Description(request=request_named(name, requests or (), rows, [view.spec.name for view in views]))


async def _describe_endpoint(
    server: AskedServer,
    view: EndpointView,
    revisions: Sequence[BoardRevision],
    rows: Sequence[WatcherRow],
    requests: Sequence[RequestLine] | None,
) -> EndpointDescription:
    name = view.spec.name
    events = await asyncio.to_thread(lambda: since_start(EventReader(server.paths.events_file).all()))
    return EndpointDescription(
        endpoint=view,
        revisions=tuple(each for each in revisions if endpoint_of(each.revision) == name),
        workers=tuple(row for row in rows if row.endpoint == name),
        requests=None if requests is None else sum(line.endpoint == name for line in requests),
        events=tuple(event for event in events if event.endpoint == name)[-_SHOWN:],
    )


def request_named(
    name: str, requests: Sequence[RequestLine], rows: Sequence[WatcherRow], endpoints: Sequence[str] = ()
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


async def _describe_watcher(
    server: AskedServer, row: WatcherRow, requests: Sequence[RequestLine] | None
) -> WatcherDescription:
    paths = server.paths
    presence = None if row.pid is None else (await server.presences())[0].get(row.watcher)
    events = await asyncio.to_thread(events_of, EventReader(paths.events_file).all(), row.watcher)
    deaths = tuple(event for event in events if event.kind == "death")
    log = paths.log_file(row.watcher)
    known = None if requests is None else [line for line in requests if line.worker == row.watcher]
    started_at = presence.started_at if presence is not None else None
    return WatcherDescription(
        **same_fields(row, WatcherDescription),
        children=() if row.pid is None or row.node != LOCAL_NODE else await asyncio.to_thread(_children, row.pid),
        age_s=None if started_at is None else max(0.0, time.monotonic() - started_at),
        starts=sum(event.what == "started" for event in events),
        deaths=deaths[-_SHOWN:],
        engine=presence.engine if presence is not None else None,
        counts=presence.counts if presence is not None else None,
        requests=None if known is None else len(known),
        leaving=None if known is None else sum(line.moving_to is not None for line in known),
        arriving=None if requests is None else sum(line.moving_to == row.watcher for line in requests),
        config=await asyncio.to_thread(_config, paths.graph_of(row.revision), row.component),
        log=str(log) if row.node == LOCAL_NODE else f"on node {row.node}: `dynamo logs {short_watcher(row.watcher)}`",
        errors=await _errors_of(server, row),
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


async def _errors_of(server: AskedServer, row: WatcherRow) -> tuple[str, ...]:
    """The last error lines of the watcher's log. None of a node that does not answer."""
    lines: Sequence[str] = ()
    if row.node == LOCAL_NODE:
        lines = await asyncio.to_thread(tail, server.paths.log_file(row.watcher), _LOG_LINES)
    elif server.places is not None:
        with suppress(SupervisorError):
            lines = (await server.places.log(row.watcher, _LOG_LINES)).lines
    return tuple(line for line in lines if any(mark in line for mark in _ERROR_MARKS))[-_SHOWN:]
