"""`dynamo ps`: what the statefile, circusd and the processes themselves say of one server."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import msgspec

from dynamo_local.bus.nats import Bus, BusAddress
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core.errors import BusError, NotRunningError, StateError, SupervisorError
from dynamo_local.core.fleet.view import TTL_S, Change
from dynamo_local.core.messages.presence import Load, Presence
from dynamo_local.core.names import BUS_SERVICE, FORKSERVER_SERVICE, MACHINERY, Subjects, parse_watcher
from dynamo_local.supervisor.circus.client import ACTIVE, CircusClient
from dynamo_local.supervisor.server.blueprint import Blueprint, check_reachable, why_absent
from dynamo_local.supervisor.server.progress import described
from dynamo_local.supervisor.upkeep.devices import held_by_others
from state.devices import holder_lines
from state.locks import server_pid
from state.model import Component, State
from state.paths import StatePaths
from state.store import StateStore

_ANSWER_WITHIN_S = TTL_S
"""Who says nothing for longer is missed by everybody else, too."""
_CONNECT_WITHIN_S = 2.0
_CIRCUS_DEADLINE_S = 5.0


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One watcher. `state` is "retiring" for a worker that is to end for good, "starting" for one that was added and is
    not settled, and "restarting" for a process that is to be replaced under its name; otherwise what its process says
    ("starting", "ready", "draining", "failed"), else "ended" (it waits to be started again), "silent" (it runs and says
    nothing), "stopped" (a template without a process)."""

    watcher: str
    component: str
    role: str
    pid: int | None
    devices: tuple[int, ...]
    state: str
    detail: str = ""
    lease: str | None = None
    url: str | None = None
    load: Load | None = None
    """Of a worker, after its last engine step."""
    no_transfer: str | None = None
    """Why a worker's engine neither lends nor borrows KV, if it does not."""


async def rows(paths: StatePaths) -> list[Row]:
    """All watchers of a running server, in the statefile's order. Raises NotRunningError when none runs."""
    state = await asyncio.to_thread(_running_state, paths)
    async with CircusClient(state.circus_endpoint, deadline_s=_CIRCUS_DEADLINE_S) as circus:
        statuses = await circus.statuses()
        pids = {name: await circus.pids(name) for name in statuses}
    expected = [name for name, status in statuses.items() if status == ACTIVE]
    present, reachable = await presences(paths.bus_file, state.namespace, expected)
    return [
        row(component, statuses.get(name), pids.get(name, ()), present.get(name), reachable)
        for name, component in state.components.items()
    ]


async def others(paths: StatePaths) -> list[str]:
    """Which of the machine's devices others hold, a line each. None while the server starts or ends."""

    def read() -> list[str]:
        blueprint = Blueprint.read(paths.blueprint_file)
        return holder_lines(blueprint.inventory.kind, held_by_others(blueprint, StateStore(paths).read()))

    try:
        return await asyncio.to_thread(read)
    except (SupervisorError, StateError, NotRunningError):
        return []


def row(
    component: Component,
    status: str | None,
    pids: tuple[int, ...],
    presence: Presence | None,
    reachable: bool,
) -> Row:
    """What is known of one watcher. `status` is circus', `reachable` tells whether the bus could be asked."""
    # A forked process has registered itself; circus knows its launcher.
    pid = component.pid or pids[0] if pids else None
    engine = presence.engine if presence is not None else None
    word, detail = _health(component, status, pid, presence, reachable)
    return Row(
        watcher=component.watcher_name,
        component=component.component,
        role=component.role,
        pid=pid,
        devices=component.devices,
        state=word,
        detail=detail,
        lease=component.lease,
        url=presence.url if presence is not None else None,
        load=presence.load if presence is not None else None,
        no_transfer=engine.no_transfer if engine is not None else None,
    )


def _health(
    component: Component, status: str | None, pid: int | None, presence: Presence | None, reachable: bool
) -> tuple[str, str]:
    if not component.holds:
        return "stopped", ""
    if component.phase is not None:
        return component.phase, _said(presence, pid)
    if status != ACTIVE or pid is None:
        return "ended", "to be started again" if status is not None else "to be started"
    if component.component == BUS_SERVICE:
        return ("ready", "") if reachable else ("failed", "does not answer")
    if component.component == FORKSERVER_SERVICE:
        return "ready", ""
    if presence is not None and presence.pid == pid:
        return presence.state, presence.detail
    return ("silent", "") if reachable else ("unknown", "the bus does not answer")


def _said(presence: Presence | None, pid: int | None) -> str:
    """The last word of a process whose state is known already."""
    if pid is None:
        return "no process"
    return described(presence) if presence is not None and presence.pid == pid else ""


async def presences(bus_file: Path, namespace: str, expected: list[str]) -> tuple[Mapping[str, Presence], bool]:
    """What processes say when asked, by watcher; and whether the bus could be reached.

    Waits until all `expected` have answered, those that never do aside, or for `TTL_S`.
    """
    awaited = {name for name in expected if parse_watcher(name).service not in MACHINERY}
    heard: dict[str, Presence] = {}
    complete = asyncio.Event()

    def on_change(change: Change) -> None:
        heard[change.presence.watcher] = change.presence
        if awaited <= heard.keys():
            complete.set()

    try:
        address = await asyncio.to_thread(BusAddress.load, bus_file)
        bus = await Bus.connect(address, name="ps", deadline_s=_CONNECT_WITHIN_S)
    except BusError:
        return heard, False
    try:
        watch = FleetWatch(bus, Subjects(namespace))
        watch.subscribe(on_change)
        await watch.start()
        async with asyncio.timeout(_ANSWER_WITHIN_S):
            if awaited:
                await complete.wait()
    except TimeoutError:
        pass
    except BusError:
        return heard, False
    finally:
        await bus.close()
    return heard, True


def _running_state(paths: StatePaths) -> State:
    if server_pid(paths) is None:
        left = " (one that crashed left a statefile)" if paths.statefile.exists() else ""
        raise NotRunningError(
            f"no server runs in namespace {paths.namespace}{left}",
            "`dynamo stop` clears it away" if left else "start one with `dynamo serve`",
        )
    try:
        state = StateStore(paths).read()
    except NotRunningError as error:
        raise why_absent(paths) from error
    check_reachable(paths, state)
    return state
