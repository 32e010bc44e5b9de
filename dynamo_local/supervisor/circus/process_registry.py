"""The process registry of the restarter: which process belongs to a watcher, and whether it is to run, by the
statefile."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass

from dynamo_local.core.errors import NotRunningError, StateError
from dynamo_local.process.groups import kill_group
from dynamo_local.supervisor.upkeep.restarter import RegisteredProcess
from state.statefile.model import Component
from state.statefile.store import StateStore
from state.statefile.transitions import clear_lease


@dataclass(frozen=True)
class StateRegistry:
    """The statefile as upkeep.restarter.ProcessRegistry."""

    store: StateStore

    async def registered(self, watcher: str) -> RegisteredProcess | None:
        component = await asyncio.to_thread(self._component, watcher)
        if component is None or component.pid is None or component.lease is None:
            return None
        return RegisteredProcess(component.pid, component.lease)

    async def ended(self, watcher: str, pid: int | None, registered: RegisteredProcess | None) -> None:
        """Kill the children of a process that ended, and clear its lease."""
        await asyncio.to_thread(self._record_end, watcher, pid, registered)

    async def wanted(self, watcher: str) -> bool:
        """Whether the watcher has a claim, and no change of it is under way. A change restarts its process itself."""
        component = await asyncio.to_thread(self._component, watcher)
        return component is not None and component.holds and component.phase is None

    def pid_of(self, watcher: str) -> int | None:
        """The pid that the watcher's process has registered; None if it has not. Blocks for milliseconds."""
        try:
            component = self._component(watcher)
        except (NotRunningError, StateError):
            # A server ends its processes even if its statefile cannot be read.
            return None
        return component.pid if component is not None else None

    def _component(self, watcher: str) -> Component | None:
        """The watcher's entry, if its process is one of this node: the pid of another one is that of a stranger."""
        return self.store.read().here.get(watcher)

    def _record_end(self, watcher: str, pid: int | None, registered: RegisteredProcess | None) -> None:
        for group in {pid, registered.pid if registered is not None else None}:
            if group is not None:
                # Children of the process would keep its devices.
                kill_group(group)
        if registered is not None:
            # If the file cannot be written now (a full disk, for example), the next process overwrites the lease.
            with suppress(NotRunningError, StateError):
                self.store.update(lambda state: clear_lease(state, watcher, registered.lease))
