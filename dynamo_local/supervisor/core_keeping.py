"""Keeps processes without an engine off the CPU cores of the engines that decode, as workers come, go and turn."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from dynamo_local.core.errors import NotRunningError, StateError
from dynamo_local.core.fleet import WORKER_ROLES, Change, Happened
from dynamo_local.core.messages import Presence
from state.cores import cores_beside
from state.devices import Inventory
from state.model import State
from state.store import StateStore

_PROC = Path("/proc")
_SETTLE_S = 0.5
"""Changes come in bursts."""


@dataclass
class CoreKeeping:
    """Of one server on CPU slots. `bus_watcher`: the NATS server's, which tells nobody that it is there.

    An engine's own processes are bound by the engine (`DYN_CPU_CORES`); here it is about all others, a worker's host
    included, once it is ready: until then it may still be about to fork its engine.
    """

    inventory: Inventory
    store: StateStore
    members: Callable[[], list[Presence]]
    bus_watcher: str
    everywhere: frozenset[int] = field(default_factory=lambda: frozenset(os.sched_getaffinity(0)))
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _known: dict[str, tuple[str, str]] = field(default_factory=dict, init=False)

    def on_change(self, change: Change) -> None:
        """Take in a change of the fleet: of who is there, its role, or its being ready."""
        presence = change.presence
        known = None if change.what is Happened.LEFT else (presence.role, presence.state)
        if self._known.get(presence.lease) == known:
            return
        if known is None:
            del self._known[presence.lease]
        else:
            self._known[presence.lease] = known
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._changed.wait()
            await asyncio.sleep(_SETTLE_S)
            self._changed.clear()
            try:
                await asyncio.to_thread(self._settle, tuple(self.members()))
            except (NotRunningError, StateError):
                # The statefile cannot be read. The server sees to that, and says so (upkeep.py).
                self._changed.set()

    def _settle(self, members: tuple[Presence, ...]) -> None:
        state = self.store.read()
        decoding = {presence.watcher for presence in members if presence.role in WORKER_ROLES}
        devices = [device for name in decoding for device in _devices(state, name)]
        cores = cores_beside(self.inventory, self.everywhere, devices)
        # Others may take part in the namespace as well. They run where they like.
        own = {self.bus_watcher, *(presence.watcher for presence in members if presence.state == "ready")}
        bind((one.pid for name, one in state.components.items() if name in own and one.pid is not None), cores)


def bind(pids: Iterable[int], cores: Collection[int]) -> None:
    """Have all threads of the processes, and those that they start, run on these cores."""
    for pid in pids:
        # They may end at any moment, and a container's cores may change. Nothing depends on where they run.
        with suppress(OSError):
            for thread in (_PROC / str(pid) / "task").iterdir():
                with suppress(OSError):
                    os.sched_setaffinity(int(thread.name), cores)


def _devices(state: State, watcher: str) -> tuple[int, ...]:
    component = state.components.get(watcher)
    return () if component is None else component.devices
