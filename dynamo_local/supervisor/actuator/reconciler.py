"""Finishes, from within the server, changes that a killed planner or command has left half done."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from dynamo_local.core.beats import until_beat
from dynamo_local.core.errors import DynamoError, NotRunningError, StateError
from dynamo_local.supervisor.actuator.local import open_actuator
from dynamo_local.supervisor.server.report import Report, ReportOnce
from state.locks import LockTimeoutError
from state.paths import StatePaths
from state.store import StateStore

_EVERY_S = 1.0


@dataclass
class Reconciler:
    """Finishes the changes of one server's namespace."""

    paths: StatePaths
    report: Report
    _requested: bool = field(default=False, init=False)
    _failure: ReportOnce = field(init=False)

    def __post_init__(self) -> None:
        self._failure = ReportOnce(self.report)

    async def run(self) -> None:
        """Reconcile whenever the statefile shows a change under way, or it was requested, until cancelled."""
        store = StateStore(self.paths)
        while True:
            await asyncio.sleep(until_beat(time.monotonic(), _EVERY_S))
            try:
                state = await asyncio.to_thread(store.read)
            except (NotRunningError, StateError):
                # The server repairs its statefile, and reports it (supervisor/upkeep/files.py).
                continue
            if self._requested or any(component.phase is not None for component in state.components.values()):
                await self.reconcile()

    def request(self) -> None:
        """Have the next round reconcile whatever the statefile shows. For a statefile that may be out of date."""
        self._requested = True

    async def reconcile(self) -> None:
        """Finish the changes that nobody works on. A process that makes a change holds the lock on changes, and is left
        alone."""
        # Reset first: another request may come meanwhile, from another thread.
        requested, self._requested = self._requested, False
        try:
            async with open_actuator(self.paths, self.report, lock_wait_s=0.0) as actuator:
                for note in await actuator.reconcile():
                    self.report.step(note)
        except LockTimeoutError:
            self._requested = self._requested or requested
        except DynamoError as error:
            # The bus may be restarting, for example. The next round tries again.
            self._requested = self._requested or requested
            self._failure.note(f"a change is left unfinished for now: {error}")
