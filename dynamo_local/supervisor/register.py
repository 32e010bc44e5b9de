"""The keeper's register of watchers: the statefile."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from dynamo_local.runtime.process_groups import kill_group
from state.store import StateStore
from state.transitions import clear_lease


@dataclass(frozen=True)
class StateRegister:
    """keeper.Register, by the statefile."""

    store: StateStore

    async def ended(self, watcher: str, pid: int | None) -> None:
        """End what the process has forked, and void its lease."""
        await asyncio.to_thread(self._record_end, watcher, pid)

    async def wanted(self, watcher: str) -> bool:
        """Whether the watcher has a claim, and no change of it is under way."""
        component = (await asyncio.to_thread(self.store.read)).components.get(watcher)
        return component is not None and component.holds and component.phase is None

    def pid_of(self, watcher: str) -> int | None:
        """The pid by which the watcher's process has registered; None if it has not. Of a forked service, circus knows
        the launcher's only. Blocks for milliseconds."""
        component = self.store.read().components.get(watcher)
        return component.pid if component is not None else None

    def _record_end(self, watcher: str, pid: int | None) -> None:
        component = self.store.read().components.get(watcher)
        registered = component.pid if component is not None else None
        for group in {pid, registered}:
            if group is not None:
                # What the process has forked would hold on to its devices.
                kill_group(group)
        if component is not None and component.lease is not None:
            lease = component.lease
            self.store.update(lambda state: clear_lease(state, watcher, lease))
