"""Finishes what a planner or command that was killed, or broken off, has left half done."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from dynamo_local.core.beats import until_beat
from dynamo_local.core.errors import DynamoError, NotRunningError, StateError
from dynamo_local.supervisor.actuator.local import open_actuator
from dynamo_local.supervisor.server.report import Report
from state.locks import LockTimeoutError
from state.paths import StatePaths
from state.store import StateStore

_LOOK_EVERY_S = 1.0


@dataclass
class Reconciler:
    """Looks after the changes of one server, from within it."""

    paths: StatePaths
    report: Report
    _wanted: bool = field(default=False, init=False)
    _said: str = field(default="", init=False)

    async def run(self) -> None:
        """Until cancelled."""
        store = StateStore(self.paths)
        while True:
            await asyncio.sleep(until_beat(time.monotonic(), _LOOK_EVERY_S))
            try:
                state = await asyncio.to_thread(store.read)
            except (NotRunningError, StateError):
                # The server sees to that, and says so (supervisor/upkeep/files.py).
                continue
            if self._wanted or any(component.phase is not None for component in state.components.values()):
                await self.look()

    def want_look(self) -> None:
        """Have the next round look, whatever the statefile says: it may be older than what it tells of."""
        self._wanted = True

    async def look(self) -> None:
        """Finish what nobody is at any more. Whoever makes a change holds the lock on changes as long as it lives."""
        # Before it is looked: it may be wanted again meanwhile, from another thread.
        wanted, self._wanted = self._wanted, False
        try:
            async with open_actuator(self.paths, self.report, patience_s=0.0) as actuator:
                for note in await actuator.reconcile():
                    self.report.step(note)
        except LockTimeoutError:
            self._wanted = self._wanted or wanted
        except DynamoError as error:
            self._wanted = self._wanted or wanted
            # The bus, say, is being started again. It is tried again then.
            self._say_once(f"a change is left unfinished for now: {error}")

    def _say_once(self, text: str) -> None:
        if text != self._said:
            self.report.step(text)
        self._said = text
