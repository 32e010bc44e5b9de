"""Finishes the changes that were left half done: takes the steps that steps.py names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import assert_never

from dynamo_local.core.errors import SilentNodeError
from dynamo_local.supervisor.actuator.add import WorkerAddition
from dynamo_local.supervisor.actuator.ports import Ports
from dynamo_local.supervisor.actuator.remove import WorkerRemoval
from dynamo_local.supervisor.actuator.restart import WorkerRestart
from dynamo_local.supervisor.actuator.steps import (
    AwaitStart,
    EndUnclaimed,
    FinishRestarting,
    FinishRetiring,
    ReleaseClaim,
    ReleaseReservation,
    Step,
    next_steps,
)
from dynamo_local.tasks import side_by_side
from state.statefile.model import State
from state.statefile.transitions import holding, release


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
        left: list[SilentNodeError] = []
        notes: list[str] = []
        for _, together in groupby(await self._steps(), key=type):
            notes += await side_by_side(self._unless_silent(step, left) for step in together)
        return tuple(note for note in notes if note), left[0] if left else None

    async def _steps(self) -> tuple[Step, ...]:
        state = await self.ports.read()
        # After the state: a claim precedes its watcher.
        statuses = await self.ports.places.statuses()
        places = (await self.ports.places.places()).values()
        return next_steps(state, statuses, [name for place in places for name in place.reservations], self.is_mine)

    async def _unless_silent(self, step: Step, left: list[SilentNodeError]) -> str:
        """The note of a step that was taken; empty for what its node left unanswered. Others are not to wait for that
        node."""
        try:
            return await self._take(step, left)
        except SilentNodeError as error:
            left.append(error)
            return ""

    async def _take(self, step: Step, left: list[SilentNodeError]) -> str:
        """Take a step, and return a note of it."""
        name = step.watcher
        match step:
            case EndUnclaimed():
                await self.removal.end_unclaimed(name)
                return f"{name} had no claim: it has ended"
            case ReleaseReservation():
                await self.removal.end_unclaimed(name)
                return f"{name} was reserved and not claimed: its devices are free"
            case ReleaseClaim(devices=devices):
                await self.ports.update(lambda state: _without_claim(state, name))
                with _noting_silence(left):
                    await self.ports.places.release(name)
                held = f"devices {list(devices)}" if devices else "no device"
                return f"{name} has no process: its claim ({held}) is released"
            case FinishRetiring():
                await self.removal.finish(name)
                return f"{name} was left retiring: it has ended"
            case FinishRestarting():
                return f"{name} was left restarting: {(await self.restart.finish(name)).note}"
            case AwaitStart():
                return f"{name} was left starting: {(await self.addition.await_ready(name)).note}"
            case _:
                assert_never(step)


@contextmanager
def _noting_silence(left: list[SilentNodeError]) -> Iterator[None]:
    try:
        yield
    except SilentNodeError as error:
        left.append(error)


def _without_claim(state: State, watcher: str) -> State:
    """The claim may be lost with a damaged statefile."""
    return release(state, watcher) if watcher in holding(state) else state
