"""Tells a new circusd, after the previous one has died, of all watchers and of the processes that they have."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from dynamo_local.supervisor.circus.adopted import stands_in
from dynamo_local.supervisor.circus.client import CircusClient
from dynamo_local.supervisor.circus.watchers import WatcherSpecs
from dynamo_local.supervisor.server.launch.blueprint import Blueprint
from dynamo_local.supervisor.server.launch.plan import plan_watcher
from dynamo_local.supervisor.server.launch.templates import WatcherPlan
from dynamo_local.supervisor.upkeep.orphans import Orphans
from state.machine.processes import Process, ProcFs, alive
from state.statefile.model import Component, State
from state.statefile.store import StateStore

_KILL_S = 10.0
_LOOK_EVERY_S = 0.02


@dataclass(frozen=True)
class TakeoverPlan:
    """`adopted`: watchers with their processes. `idle`: watchers whose process is gone. `strays`: processes without a
    claim, which are killed."""

    adopted: Mapping[str, Process]
    idle: tuple[str, ...]
    strays: tuple[Process, ...]


def plan_takeover(state: State, running: Mapping[str, Process]) -> TakeoverPlan:
    """Decide what becomes of each watcher, by the statefile and the processes that run. Pure.

    Watchers of other nodes are theirs. A watcher without a process is left out while a change of it is under way:
    whoever makes the change adds it again.
    """
    holding = {name: component for name, component in state.here.items() if component.holds}
    return TakeoverPlan(
        {name: running[name] for name in holding if name in running},
        tuple(name for name, component in holding.items() if name not in running and component.phase is None),
        tuple(process for name, process in running.items() if name not in holding),
    )


@dataclass(frozen=True)
class CircusTakeover:
    """Makes takeovers of one server. `blueprint`: gives the blueprint as it is now. `machinery`: plans of watchers that
    are no service of the graph."""

    store: StateStore
    blueprint: Callable[[], Blueprint]
    specs: WatcherSpecs
    machinery: Mapping[str, WatcherPlan]

    async def take_over(self, circus: CircusClient, circusd_pid: int) -> str:
        """Tell the circusd of that pid of all watchers. The restarter starts idle ones. Returns a summary in words."""
        state = await asyncio.to_thread(self.store.read)
        # After the state: the templates of an endpoint's revision precede its claims, and outlast its processes.
        blueprint = await asyncio.to_thread(self.blueprint)
        found = plan_takeover(state, await Orphans(self.specs.paths).look())
        await self._end(found.strays)
        for name, process in found.adopted.items():
            await circus.add(self.specs.adopting(self._plan(blueprint, state.components[name]), process, circusd_pid))
        dead = [name for name, process in found.adopted.items() if not await _is_followed(circus, name, process)]
        for name in dead:
            # Otherwise its next process would run before the restarter has seen the end of this one.
            await circus.remove(name)
        idle = (*found.idle, *dead)
        for name in idle:
            await circus.register(self.specs.of(self._plan(blueprint, state.components[name])))
        running = len(found.adopted) - len(dead)
        return f"{_counted(running)}{_without(idle)}"

    def _plan(self, blueprint: Blueprint, component: Component) -> WatcherPlan:
        name = component.watcher_name
        if name in self.machinery:
            return self.machinery[name]
        template = blueprint.template(component.component, component.watcher.revision)
        return plan_watcher(template, component.watcher, blueprint.inventory, component.devices)

    async def _end(self, strays: Iterable[Process]) -> None:
        await asyncio.to_thread(ProcFs().end, tuple(strays), 0.0, _KILL_S)


async def _is_followed(circus: CircusClient, name: str, process: Process) -> bool:
    """Wait until circusd's process of the watcher stands for the adopted one. Returns whether that one lives."""
    while alive(process.pid, process.start_time):
        if any(stands_in(pid) for pid in await circus.children(name)):
            return True
        await asyncio.sleep(_LOOK_EVERY_S)
    return False


def _counted(running: int) -> str:
    return "the process that runs" if running == 1 else f"the {running} processes that run"


def _without(idle: tuple[str, ...]) -> str:
    return f"; ended meanwhile: {', '.join(idle)}" if idle else ""
