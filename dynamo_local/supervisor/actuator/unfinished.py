"""Finishes the changes that were left half done: the table of what is found, and what follows, is in actuator.py."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dynamo_local.core.errors import SilentNodeError
from dynamo_local.supervisor.actuator.add import WorkerAddition
from dynamo_local.supervisor.actuator.ports import Ports
from dynamo_local.supervisor.actuator.remove import WorkerRemoval
from dynamo_local.supervisor.actuator.restart import WorkerRestart
from dynamo_local.supervisor.actuator.side_by_side import side_by_side
from dynamo_local.supervisor.places.port import Status
from state.statefile.model import State
from state.statefile.reconcile import reconcile, unclaimed
from state.statefile.transitions import holding, in_phase


@dataclass(frozen=True)
class Unfinished:
    """The changes of one actuator that were left half done. `is_mine`: whether a watcher of that name is among those
    that it changes. The caller holds the lock on changes."""

    ports: Ports
    addition: WorkerAddition
    removal: WorkerRemoval
    restart: WorkerRestart
    is_mine: Callable[[str], bool]

    async def finish(self) -> tuple[tuple[str, ...], SilentNodeError | None]:
        """Finish them. Returns a note for each, and why another one is left as it is, if one is: its node does not
        answer. Raises SupervisorError for any other failure."""
        state = await self.ports.read()
        # After the state: a claim precedes its watcher.
        statuses = await self.ports.places.statuses()
        left: list[SilentNodeError] = []

        async def finished(finish: Callable[[str], Coroutine[Any, Any, str]], names: Iterable[str]) -> list[str]:
            notes = await side_by_side(_unless_silent(finish(name), left) for name in names if self.is_mine(name))
            return [note for note in notes if note]

        notes = await finished(self._end_unclaimed, unclaimed(state, statuses))
        places = (await self.ports.places.places()).values()
        notes += await finished(self._release_reserved, [name for place in places for name in place.reservations])
        state, released, names = await self._drop_dead(statuses)
        notes += released
        await finished(self._release, names)
        notes += await finished(self._finish_retiring, in_phase(state, "retiring"))
        notes += await finished(self._finish_restarting, in_phase(state, "restarting"))
        notes += await finished(self._finish_starting, in_phase(state, "starting"))
        return tuple(notes), left[0] if left else None

    async def _finish_retiring(self, name: str) -> str:
        await self.removal.finish(name)
        return f"{name} was left retiring: it has ended"

    async def _finish_restarting(self, name: str) -> str:
        return f"{name} was left restarting: {(await self.restart.finish(name)).note}"

    async def _finish_starting(self, name: str) -> str:
        return f"{name} was left starting: {(await self.addition.await_ready(name)).note}"

    async def _end_unclaimed(self, name: str) -> str:
        await self.removal.end_unclaimed(name)
        return f"{name} had no claim: it has ended"

    async def _release_reserved(self, name: str) -> str:
        await self.removal.end_unclaimed(name)
        return f"{name} was reserved and not claimed: its devices are free"

    async def _release(self, name: str) -> str:
        await self.ports.places.release(name)
        return ""

    async def _drop_dead(self, statuses: Mapping[str, Status]) -> tuple[State, tuple[str, ...], list[str]]:
        """Drop claims without a watcher. Returns the new state, a note for each, and whose devices are to be
        released."""
        notes: list[str] = []
        names: set[str] = set()

        def released(state: State) -> State:
            after, found = reconcile(state, statuses, self.is_mine)
            notes[:] = found
            names.update(holding(state) - holding(after))
            return after

        return await self.ports.update(released), tuple(notes), sorted(names)


async def _unless_silent(work: Coroutine[Any, Any, str], left: list[SilentNodeError]) -> str:
    """The note of what is finished; empty for what its node left unanswered. Others are not to wait for that node."""
    try:
        return await work
    except SilentNodeError as error:
        left.append(error)
        return ""
