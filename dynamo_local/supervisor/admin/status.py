"""The state of each watcher, by the statefile, circusd, and the processes' own presences on the bus."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import msgspec

from dynamo_local.control.answers import WatcherRow
from dynamo_local.core.errors import NotRunningError, StateError, SupervisorError
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.names import (
    BUS_SERVICE,
    FORKSERVER_SERVICE,
    LOCAL_NODE,
    endpoint_of,
    parse_revision,
)
from dynamo_local.core.routing.kv_ways import ways_of_kv
from dynamo_local.supervisor.admin.asked import NO_ANSWER, AskedServer
from dynamo_local.supervisor.circus.client import ACTIVE
from dynamo_local.supervisor.server.launch.blueprint import Blueprint
from dynamo_local.supervisor.server.reports.progress import described
from dynamo_local.supervisor.upkeep.holders import held_by_others
from state.devices.allocation import holder_lines
from state.statefile.model import Component


async def list_watchers(server: AskedServer) -> list[WatcherRow]:
    """List all watchers, as `in_order`. Raises SupervisorError, StateError."""
    state, (statuses, pids), (present, away) = await asyncio.gather(
        server.state(), server.processes(), server.presences()
    )
    rows = [
        row(component, statuses.get(name), pids.get(name, ()), present.get(name), away)
        if component.node == state.node
        else row_of_node(component, present.get(name), away)
        for name, component in state.components.items()
    ]
    ways = ways_of_kv(present.values())
    return in_order(msgspec.structs.replace(each, kv=ways.get(each.watcher)) for each in rows)


async def devices_of_others(server: AskedServer) -> list[str]:
    """Describe the devices of this machine that others hold, in a line each. Empty while the server starts or ends."""

    def read() -> list[str]:
        blueprint = Blueprint.read(server.paths)
        return holder_lines(blueprint.inventory.kind, held_by_others(blueprint, server.store.read()))

    try:
        return await asyncio.to_thread(read)
    except (SupervisorError, StateError, NotRunningError):
        return []


def in_order(rows: Iterable[WatcherRow]) -> list[WatcherRow]:
    """List the graph's own watchers, then those of each endpoint. An endpoint's watcher without a process is left out:
    the endpoint's own state says that it is asleep, or has failed."""
    return sorted((row for row in rows if not row.revision or row.state != "stopped"), key=_by_endpoint)


def _by_endpoint(row: WatcherRow) -> tuple[str, int]:
    return (row.endpoint, parse_revision(row.revision).number) if row.revision else ("", 0)


def row(
    component: Component,
    status: str | None,
    pids: tuple[int, ...],
    presence: Presence | None,
    away: str,
) -> WatcherRow:
    """Put together what is known of one watcher. `status` and `pids` are circus's; `away`: why nothing is heard on the
    bus; empty where it answers."""
    # The statefile has a forked process's own pid; circus knows its launcher's only.
    pid = component.pid or pids[0] if pids else None
    return _row(component, pid, presence, *_health(component, status, pid, presence, away))


def row_of_node(component: Component, presence: Presence | None, away: str) -> WatcherRow:
    """The same of a watcher on another node, whose circusd is not asked."""
    pid = None if presence is None else presence.pid
    return _row(component, pid, presence, *_health(component, ACTIVE, pid, presence, away))


def _row(component: Component, pid: int | None, presence: Presence | None, health: str, detail: str) -> WatcherRow:
    revision, engine = component.watcher.revision, presence.engine if presence is not None else None
    return WatcherRow(
        watcher=component.watcher_name,
        component=component.component,
        role=component.role,
        endpoint=endpoint_of(revision),
        revision=revision,
        pid=pid,
        devices=component.devices,
        share=component.resources.share,
        state=health,
        detail=detail,
        lease=component.lease,
        url=presence.url if presence is not None else None,
        load=presence.load if presence is not None else None,
        no_transfer=engine.no_transfer if engine is not None else None,
        node=component.node,
    )


def _health(
    component: Component, status: str | None, pid: int | None, presence: Presence | None, away: str
) -> tuple[str, str]:
    if not component.holds:
        return "stopped", ""
    if component.phase is not None:
        return component.phase, _described(presence, pid)
    if component.node != LOCAL_NODE and pid is None:
        return ("unknown", away) if away else ("silent", "its node may not answer")
    if status != ACTIVE or pid is None:
        return "ended", "to be started again" if status is not None else "to be started"
    if component.component == BUS_SERVICE:
        return ("failed", "does not answer") if away == NO_ANSWER else ("ready", "")
    if component.component == FORKSERVER_SERVICE:
        return "ready", ""
    if presence is not None and presence.pid == pid:
        return presence.state, presence.detail
    return ("unknown", away) if away else ("silent", "")


def _described(presence: Presence | None, pid: int | None) -> str:
    """The last presence of a process, in words, for a watcher whose state is told by the change under way."""
    if pid is None:
        return "no process"
    return described(presence) if presence is not None and presence.pid == pid else ""
