"""The keeper's register of watchers: the statefile."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass

from dynamo_local.core.errors import NotRunningError, StateError
from dynamo_local.process.groups import kill_group
from dynamo_local.supervisor.upkeep.restarter import RegisteredProcess
from state.model import Component
from state.store import StateStore
from state.transitions import clear_lease


@dataclass(frozen=True)
class StateRegistry:
    """keeper.Register, by the statefile."""

    store: StateStore

    async def registered(self, watcher: str) -> RegisteredProcess | None:
        component = await asyncio.to_thread(self._component, watcher)
        if component is None or component.pid is None or component.lease is None:
            return None
        return RegisteredProcess(component.pid, component.lease)

    async def ended(self, watcher: str, pid: int | None, registered: RegisteredProcess | None) -> None:
        """End what the process has forked, and void its lease."""
        await asyncio.to_thread(self._record_end, watcher, pid, registered)

    async def wanted(self, watcher: str) -> bool:
        """Whether the watcher has a claim, and no change of it is under way."""
        component = await asyncio.to_thread(self._component, watcher)
        return component is not None and component.holds and component.phase is None

    def pid_of(self, watcher: str) -> int | None:
        """The pid by which the watcher's process has registered; None if it has not. Of a forked service, circus knows
        the launcher's only. Blocks for milliseconds."""
        try:
            component = self._component(watcher)
        except (NotRunningError, StateError):
            # The end of a server does not wait for its statefile.
            return None
        return component.pid if component is not None else None

    def _component(self, watcher: str) -> Component | None:
        return self.store.read().components.get(watcher)

    def _record_end(self, watcher: str, pid: int | None, registered: RegisteredProcess | None) -> None:
        for group in {pid, registered.pid if registered is not None else None}:
            if group is not None:
                # What the process has forked would hold on to its devices.
                kill_group(group)
        if registered is not None:
            # If it cannot be written now (a disk is full, say), the next process's lease takes its place.
            with suppress(NotRunningError, StateError):
                self.store.update(lambda state: clear_lease(state, watcher, registered.lease))
