"""Removing a worker: its claim is marked as retiring, its process ends, its devices are released.

A crash may follow any of the steps: repeated from the first, they complete the removal.
"""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_local.core.errors import BusError, SupervisorError, UsageError
from dynamo_local.core.fleet.view import WORKER_ROLES
from dynamo_local.core.planning.actions import RemoveWorker
from dynamo_local.supervisor.actuator.ports import Ports, Result
from dynamo_local.supervisor.server.launch.blueprint import worker_of
from state.statefile.model import Component, State
from state.statefile.transitions import clear_lease, entry, release, retire

UNDO_S = 5.0
"""The time that a process has to end by itself if it never became ready: it has no requests to finish."""


def retire_worker(state: State, change: RemoveWorker) -> State:
    """Mark a worker as retiring. Pure. Raises UsageError for what is no worker, or has another role by now."""
    component = worker_of(state, change.watcher)
    if component.role != change.role:
        raise UsageError(f"{change.watcher} has the role {component.role} by now, not {change.role}")
    return retire(state, change.watcher)


@dataclass(frozen=True)
class WorkerRemoval:
    """Removes workers. `drain_deadline_s`: the time that a worker has to finish its requests and end by itself."""

    ports: Ports
    drain_deadline_s: float

    async def remove(self, change: RemoveWorker) -> Result:
        """End a worker in order. Raises UsageError for what is no worker."""
        await self.ports.update(lambda state: retire_worker(state, change))
        await self.finish(change.watcher)
        return Result(True, change.watcher, "ended")

    async def undo(self, watcher: str) -> None:
        """End a worker whose start failed."""
        await self.ports.update(lambda state: retire(state, watcher))
        await self.finish(watcher, UNDO_S)

    async def finish(self, watcher: str, deadline_s: float | None = None) -> None:
        """End a worker that is marked as retiring, and release its devices."""
        await self._end(watcher, self.drain_deadline_s if deadline_s is None else deadline_s)
        await self.ports.update(lambda state: release(state, watcher))
        try:
            await self.ports.places.release(watcher)
        except SupervisorError as error:
            # Not fatal: the worker has ended, and a reservation that nobody has claimed is released by the reconciler.
            self.ports.report.step(f"{watcher}  reservation not released yet: {error}")

    async def end_process(self, watcher: str) -> None:
        """End the process of an entry that is marked as restarting. The entry keeps its name and devices."""
        await self._end(watcher, self.drain_deadline_s)
        # It must not be taken for the next one. It may have announced itself only after it was told to end, so the
        # statefile is read again.
        await self.ports.update(lambda state: _without_lease(state, watcher))

    async def end_unclaimed(self, watcher: str) -> None:
        """End and remove a watcher that has no claim in the statefile."""
        await self.ports.places.end(watcher, UNDO_S)
        await self.ports.places.release(watcher)

    async def _end(self, watcher: str, deadline_s: float) -> None:
        component = entry(await self.ports.read(), watcher)
        await self._revoke(component)
        await self.ports.places.end(watcher, deadline_s)

    async def _revoke(self, component: Component) -> None:
        """Have the routers send no more requests to the worker."""
        # A prefill worker takes its jobs from the queue itself, and stops doing so when it is told to end.
        if component.lease is None or component.role not in WORKER_ROLES:
            return
        self.ports.report.step(f"{component.watcher_name}  gets no more requests")
        try:
            await self.ports.fleet.revoke(component.lease, component.watcher.revision)
        except BusError as error:
            # Not fatal: the worker announces that it drains as soon as it is told to end.
            self.ports.report.step(f"{component.watcher_name}  lease not revoked: {error}")


def _without_lease(state: State, watcher: str) -> State:
    lease = entry(state, watcher).lease
    return state if lease is None else clear_lease(state, watcher, lease)
