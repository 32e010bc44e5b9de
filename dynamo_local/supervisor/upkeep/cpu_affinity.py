"""Keeps processes without an engine off the CPU cores of the engines that decode.

The cores follow the workers as they come, go and change roles. While programs of others compute on the cores that are
left to these processes, they may run anywhere.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from dynamo_local.core.errors import NotRunningError, StateError
from dynamo_local.core.fleet.view import WORKER_ROLES, Change, Happened
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.process.soft_binding import Binding, rebind
from dynamo_local.supervisor.circus.process_registry import Registration
from state.devices.allocation import Inventory
from state.machine.cores import cores_beside
from state.machine.threads import CoreWatch, bind_thread, family_of, threads_of, times_of_all
from state.statefile.model import State

_log = logging.getLogger(__name__)

_DEBOUNCE_S = 0.5
"""Wait after a change, as changes come in bursts. Also the interval of measurements while engines have requests."""


@dataclass
class CpuAffinity:
    """Binds the processes of one server on CPU slots.

    `members`: presences on the bus. `bus_watcher`: the NATS server's watcher, which has no presence. `everywhere`: the
    cores that may be used. `watch`: measures the use of these cores. An engine binds its own processes
    (`DYN_CPU_CORES`). All others are bound here, including the host of a worker once it is ready: before, it may be
    about to fork its engine, which would inherit the binding.
    """

    inventory: Inventory
    registration: Registration
    members: Callable[[], list[Presence]]
    bus_watcher: str
    everywhere: frozenset[int] = field(default_factory=lambda: frozenset(os.sched_getaffinity(0)))
    watch: CoreWatch | None = None
    _wanted: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _changed: bool = field(default=False, init=False)
    _known: dict[str, tuple[str, str]] = field(default_factory=dict, init=False)
    _binding: Binding = field(init=False)
    _pids: tuple[int, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        self._binding = Binding(self.everywhere, self.everywhere, anywhere=True)
        self._watch = self.watch or CoreWatch(self.everywhere)

    def on_change(self, change: Change) -> None:
        """Note a change of the fleet. Bindings depend on which processes there are, their roles, states, and load."""
        presence = change.presence
        known = None if change.what is Happened.LEFT else (presence.role, presence.state)
        if self._known.get(presence.lease) != known:
            if known is None:
                del self._known[presence.lease]
            else:
                self._known[presence.lease] = known
            self._changed = True
            self._wanted.set()
        elif presence.load is not None and presence.load.running:
            self._wanted.set()

    async def run(self) -> None:
        """Bind processes after each change, and measure while engines have requests, until cancelled."""
        while True:
            await self._wanted.wait()
            await asyncio.sleep(_DEBOUNCE_S)
            self._wanted.clear()
            changed, self._changed = self._changed, False
            try:
                await asyncio.to_thread(self._bind_all if changed else self._measure, tuple(self.members()))
            except (NotRunningError, StateError):
                # The statefile cannot be read. The server repairs it, and reports it (files.py).
                self._changed = True
                self._wanted.set()

    def _bind_all(self, members: tuple[Presence, ...]) -> None:
        state = self.registration.read()
        decoding = {presence.watcher for presence in members if presence.role in WORKER_ROLES}
        devices = [device for name in decoding for device in _devices(state, name)]
        cores = cores_beside(self.inventory, self.everywhere, devices)
        # Processes that this server did not start may have presences, too. They are left alone.
        own = {self.bus_watcher, *(presence.watcher for presence in members if presence.state in ("ready", "parked"))}
        self._pids = tuple(one.pid for name, one in state.here.items() if name in own and one.pid is not None)
        if cores != self._binding.home:
            self._binding = Binding(cores, cores, anywhere=True)
        bind(self._pids, self._binding.cores)

    def _measure(self, members: tuple[Presence, ...]) -> None:
        if self._binding.home == self.everywhere:
            return
        # Engines are no strangers: these processes share cores with prefill engines on purpose.
        engines = {pid for presence in members for pid in family_of(presence.pid)} - set(self._pids)
        seen = self._watch.look(times_of_all(self._pids), times_of_all(engines))
        if seen is None:
            return
        was, self._binding = self._binding, rebind(self._binding, *seen, time.monotonic())
        if self._binding.cores != was.cores:
            _log.info("processes without an engine are on cores %s now", sorted(self._binding.cores))
            bind(self._pids, self._binding.cores)


def bind(pids: Iterable[int], cores: Collection[int]) -> None:
    """Have all threads of the processes, and those that they start, run on these cores.

    Threads that end meanwhile and cores that are gone are ignored: binding is for speed only.
    """
    for pid in pids:
        for thread in threads_of(pid):
            bind_thread(thread, cores)


def _devices(state: State, watcher: str) -> tuple[int, ...]:
    component = state.here.get(watcher)
    return () if component is None else component.devices
