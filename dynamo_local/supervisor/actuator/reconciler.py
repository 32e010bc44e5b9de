"""Finishes changes that were left half done, by orders that have failed or were cancelled."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from dynamo_local.core.beats import until_beat
from dynamo_local.core.errors import DynamoError, NotRunningError, StateError
from dynamo_local.core.names import endpoint_of
from dynamo_local.supervisor.actuator.actuators import Actuators
from dynamo_local.supervisor.server.reports.report import Report, ReportOnce
from state.statefile.model import State

_EVERY_S = 1.0


@dataclass
class Reconciler:
    """Finishes the changes of one server: those of the graph's own processes, and those of each endpoint, at the same
    time."""

    actuators: Actuators
    report: Report
    _due: set[str] = field(default_factory=set, init=False)
    """The endpoints, "" for the graph itself, that are to be reconciled whatever the statefile shows."""
    _requested: bool = field(default=False, init=False)
    """Whether all are to be."""
    _under_way: dict[str, asyncio.Task[None]] = field(default_factory=dict, init=False)
    _failures: dict[str, ReportOnce] = field(default_factory=dict, init=False)

    async def run(self) -> None:
        """Reconcile whenever the statefile shows a change under way, or it was requested, until cancelled."""
        store = self.actuators.machinery.store
        try:
            while True:
                await asyncio.sleep(until_beat(time.monotonic(), _EVERY_S))
                try:
                    state = await asyncio.to_thread(store.read)
                except (NotRunningError, StateError):
                    # The server repairs its statefile, and reports it (supervisor/upkeep/files.py).
                    continue
                await self._begin(state)
        finally:
            for task in self._under_way.values():
                task.cancel()
            await asyncio.gather(*self._under_way.values(), return_exceptions=True)

    def request(self) -> None:
        """Have the next round reconcile whatever the statefile shows. For a statefile that may be out of date."""
        self._requested = True

    async def reconcile(self, endpoint: str = "") -> None:
        """Finish the changes that nobody works on, of that endpoint's workers or the graph's own processes. Where a
        change is under way, nothing is done: whoever makes it has finished what was left, or the next round does."""
        try:
            actuator = await self.actuators.of(endpoint, self.report)
            if self.actuators.is_changing(endpoint):
                return
            # First: it may become due again meanwhile.
            self._due.discard(endpoint)
            for note in await actuator.reconcile():
                self.report.step(note)
            self._failures.pop(endpoint, None)
        except DynamoError as error:
            # The bus may be restarting, for example. The next round tries again.
            self._due.add(endpoint)
            failure = self._failures.setdefault(endpoint, ReportOnce(self.report))
            failure.note(f"a change is left unfinished for now: {error}")

    async def _begin(self, state: State) -> None:
        """Begin to reconcile where it is due and not under way: an endpoint whose workers start for long holds up no
        other."""
        if self._requested:
            self._requested = False
            self._due |= await asyncio.to_thread(self._all, state)
        phases = {endpoint_of(c.watcher.revision) for c in state.components.values() if c.phase is not None}
        for endpoint in [endpoint for endpoint, task in self._under_way.items() if task.done()]:
            self._under_way.pop(endpoint).result()
        for endpoint in sorted((phases | self._due) - self._under_way.keys()):
            # Most changes that the statefile shows are under way.
            if not self.actuators.is_changing(endpoint):
                name = f"reconciling {endpoint or 'the graph'}"
                self._under_way[endpoint] = asyncio.create_task(self.reconcile(endpoint), name=name)

    def _all(self, state: State) -> set[str]:
        # An endpoint may have lost its claims with the statefile that was damaged.
        revisions = {component.watcher.revision for component in state.components.values()}
        return {"", *map(endpoint_of, revisions | self.actuators.machinery.blueprint.revisions())}
