"""`dynamo ps`: the state of each watcher, by the statefile, circusd, and the processes' own presences on the bus."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Set
from contextlib import suppress

import msgspec

from dynamo_local.bus.probing import probe, speaks_plainly
from dynamo_local.core.errors import BusError, NotRunningError, StateError, SupervisorError
from dynamo_local.core.fleet.view import TTL_S, Change
from dynamo_local.core.messages.presence import Load, Presence
from dynamo_local.core.names import (
    BUS_SERVICE,
    FORKSERVER_SERVICE,
    LOCAL_NODE,
    MACHINERY,
    endpoint_of,
    parse_revision,
    parse_watcher,
)
from dynamo_local.core.routing.kv_ways import KvWays, ways_of_kv
from dynamo_local.core.subjects import Subjects
from dynamo_local.supervisor.admin.connect import address_of, bus_of, state_of
from dynamo_local.supervisor.circus.client import ACTIVE, CircusClient
from dynamo_local.supervisor.server.launch.blueprint import Blueprint
from dynamo_local.supervisor.server.reports.progress import described
from dynamo_local.supervisor.upkeep.holders import held_by_others
from state.devices.allocation import holder_lines
from state.paths import StatePaths
from state.statefile.model import Component
from state.statefile.store import StateStore

_ANSWER_WITHIN_S = TTL_S
"""A process that is silent for longer counts as gone for routers and planner as well."""

_CIRCUS_DEADLINE_S = 5.0


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A watcher as `dynamo ps` shows it.

    `state`: the change under way, if there is one ("reserved", "starting", "retiring", "restarting"). Otherwise the
    state that the process announces ("starting", "ready", "parked", "draining", "failed"). Otherwise "ended" (to be
    started again), "silent" (a process that announces nothing), "unknown" (the bus does not answer) or "stopped" (a
    service of the graph without a process).
    """

    watcher: str
    component: str
    role: str
    endpoint: str = ""
    """The endpoint that the process works for; empty for the graph's own processes."""
    revision: str = ""
    """The revision of that endpoint, such as "chat@2"."""
    pid: int | None
    devices: tuple[int, ...]
    share: float = 1.0
    """The part of its one device that the watcher has; 1 for devices that it holds whole."""
    state: str
    detail: str = ""
    lease: str | None = None
    url: str | None = None
    load: Load | None = None
    """The worker's load after its last engine step."""
    no_transfer: str | None = None
    """The reason why the worker's engine cannot transfer KV; None if it can."""
    kv: KvWays | None = None
    """How KV of other workers gets to this one; None for what is no worker, or announces nothing."""
    node: str = LOCAL_NODE
    """Where the process runs, and whose its pid and devices are; "local": the server's machine."""


async def list_watchers(paths: StatePaths) -> list[Row]:
    """List all watchers of a running server, as `in_order`. Raises as `state_of`."""
    state = await state_of(paths)
    far = [name for name, entry in state.components.items() if entry.node != state.node and entry.lease is not None]
    async with CircusClient(state.circus_endpoint, deadline_s=_CIRCUS_DEADLINE_S) as circus:
        statuses = await circus.statuses()
        pids = {name: await circus.pids(name) for name in statuses}
    expected = [*(name for name, status in statuses.items() if status == ACTIVE), *far]
    present, reachable = await presences(paths, expected)
    rows = [
        row(component, statuses.get(name), pids.get(name, ()), present.get(name), reachable)
        if component.node == state.node
        else row_of_node(component, present.get(name), reachable)
        for name, component in state.components.items()
    ]
    ways = ways_of_kv(present.values())
    return in_order(msgspec.structs.replace(each, kv=ways.get(each.watcher)) for each in rows)


async def devices_of_others(paths: StatePaths) -> list[str]:
    """Describe the devices of this machine that others hold, in a line each. Empty while the server starts or ends."""

    def read() -> list[str]:
        blueprint = Blueprint.read(paths)
        return holder_lines(blueprint.inventory.kind, held_by_others(blueprint, StateStore(paths).read()))

    try:
        return await asyncio.to_thread(read)
    except (SupervisorError, StateError, NotRunningError):
        return []


def in_order(rows: Iterable[Row]) -> list[Row]:
    """List the graph's own watchers, then those of each endpoint. An endpoint's watcher without a process is left out:
    the endpoint's own state says that it is asleep, or has failed."""
    return sorted((row for row in rows if not row.revision or row.state != "stopped"), key=_by_endpoint)


def _by_endpoint(row: Row) -> tuple[str, int]:
    return (row.endpoint, parse_revision(row.revision).number) if row.revision else ("", 0)


def row(
    component: Component,
    status: str | None,
    pids: tuple[int, ...],
    presence: Presence | None,
    reachable: bool,
) -> Row:
    """Put together what is known of one watcher. `status` and `pids` are circus's; `reachable`: the bus answers."""
    # A forked process registers its own pid in the statefile; circus knows its launcher's only.
    pid = component.pid or pids[0] if pids else None
    return _row(component, pid, presence, *_health(component, status, pid, presence, reachable))


def row_of_node(component: Component, presence: Presence | None, reachable: bool) -> Row:
    """The same of a watcher on another node, whose circusd is not asked."""
    pid = None if presence is None else presence.pid
    return _row(component, pid, presence, *_health(component, ACTIVE, pid, presence, reachable))


def _row(component: Component, pid: int | None, presence: Presence | None, health: str, detail: str) -> Row:
    revision, engine = component.watcher.revision, presence.engine if presence is not None else None
    return Row(
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
    component: Component, status: str | None, pid: int | None, presence: Presence | None, reachable: bool
) -> tuple[str, str]:
    if not component.holds:
        return "stopped", ""
    if component.phase is not None:
        return component.phase, _described(presence, pid)
    if component.node != LOCAL_NODE and pid is None:
        return ("silent", "its node may not answer") if reachable else ("unknown", "the bus does not answer")
    if status != ACTIVE or pid is None:
        return "ended", "to be started again" if status is not None else "to be started"
    if component.component == BUS_SERVICE:
        return ("ready", "") if reachable else ("failed", "does not answer")
    if component.component == FORKSERVER_SERVICE:
        return "ready", ""
    if presence is not None and presence.pid == pid:
        return presence.state, presence.detail
    return ("silent", "") if reachable else ("unknown", "the bus does not answer")


def _described(presence: Presence | None, pid: int | None) -> str:
    """The last presence of a process, in words, for a watcher whose state is told by the change under way."""
    if pid is None:
        return "no process"
    return described(presence) if presence is not None and presence.pid == pid else ""


async def presences(paths: StatePaths, expected: list[str]) -> tuple[Mapping[str, Presence], bool]:
    """Ask all processes for their presence. Returns presences by watcher, and whether the bus could be reached.

    Waits until all `expected` have answered, or for `TTL_S`. NATS and the fork server announce nothing, and are not
    waited for.
    """
    awaited = {name for name in expected if parse_watcher(name).service not in MACHINERY}
    try:
        address = await address_of(paths)
        if speaks_plainly(address):
            return await probe(address, Subjects(paths.namespace), awaited, _ANSWER_WITHIN_S), True
        return await _presences_by_client(paths, awaited), True
    except (BusError, SupervisorError, NotRunningError):
        # A server that starts has no bus yet: its watchers are shown without presences.
        return {}, False


async def _presences_by_client(paths: StatePaths, awaited: Set[str]) -> dict[str, Presence]:
    """As `probe`, over a connection of the NATS client, for servers with TLS or users. Raises as `bus_of`."""
    from dynamo_local.bus.presence import FleetWatch

    heard: dict[str, Presence] = {}
    complete = asyncio.Event()

    def on_change(change: Change) -> None:
        heard[change.presence.watcher] = change.presence
        if awaited <= heard.keys():
            complete.set()

    async with bus_of(paths, "ps") as bus:
        watch = FleetWatch(bus, Subjects(paths.namespace), everywhere=True)
        watch.subscribe(on_change)
        await watch.start()
        with suppress(TimeoutError):
            async with asyncio.timeout(_ANSWER_WITHIN_S):
                if awaited:
                    await complete.wait()
    return heard
