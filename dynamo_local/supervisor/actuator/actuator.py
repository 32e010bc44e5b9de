"""Makes changes of what runs real: the one way in which workers are added, removed, turned and restarted.

The planner, `dynamo scale`, `dynamo drain` and `dynamo restart` change nothing but through it, one change at a time.
Each step leaves statefile and circus such that `reconcile` can tell what was under way, and finish it:

    claimed, no watcher          the start never happened: the claim is released
    starting, with a watcher     waited for, then settled, or undone
    retiring                     told to end again, waited for, released
    restarting                   told to end again, waited for, started again, waited for
    a watcher without a claim    ended and removed

Whoever holds the turn is the only one who has a change under way, so that any mark found is one that was left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from dynamo_local.core.errors import ConfigError, NotRunningError, UsageError
from dynamo_local.core.names import parse_watcher
from dynamo_local.core.planning.actions import (
    Action,
    ActionOutcome,
    AddWorker,
    DeviceLimits,
    RemoveWorker,
    Restart,
    SwitchRole,
)
from dynamo_local.supervisor.actuator.add import UNDO_S, WorkerAddition
from dynamo_local.supervisor.actuator.ports import Ports, Result
from dynamo_local.supervisor.actuator.remove import WorkerRemoval
from dynamo_local.supervisor.actuator.restart import WorkerRestart
from dynamo_local.supervisor.server.blueprint import Blueprint, only_starting_or_ending
from state.model import State
from state.reconcile import reconcile, unclaimed
from state.transitions import in_phase


class LocalActuator:
    """The actuator of one running server (core.planning.actions.Actuator)."""

    def __init__(self, world: Ports, blueprint: Blueprint, ready_deadline_s: float | None = None) -> None:
        self._world = world
        self._down = WorkerRemoval(world, blueprint.drain_deadline_s)
        ready_s = blueprint.ready_deadline_s if ready_deadline_s is None else ready_deadline_s
        self._up = WorkerAddition(world, blueprint, self._down, ready_s)
        self._again = WorkerRestart(world, blueprint, self._up, self._down)

    async def apply(self, change: Action, limits: DeviceLimits) -> ActionOutcome:
        """Make one change, once what earlier ones have left is finished. Cancelled, it leaves the rest to whoever
        reconciles next: the server does within seconds."""
        try:
            async with self._world.turn():
                for note in await self._reconcile():
                    self._world.report.step(note)
                started = self._world.clock()
                result = await self._make(change, limits)
                took_s = self._world.clock() - started
        except NotRunningError as error:
            raise only_starting_or_ending() from error
        return ActionOutcome(change, result.done, result.watcher, result.note, took_s)

    async def reconcile(self) -> tuple[str, ...]:
        """Finish what was left half done. Waits for the turn, and for workers that were left starting."""
        try:
            async with self._world.turn():
                return await self._reconcile()
        except NotRunningError as error:
            raise only_starting_or_ending() from error

    async def _make(self, change: Action, limits: DeviceLimits) -> Result:
        try:
            match change:
                case AddWorker():
                    return await self._up.add(change, limits)
                case RemoveWorker():
                    return await self._down.remove(change)
                case Restart():
                    return await self._again.restart(change, limits)
                case SwitchRole():
                    return await self._switch(change)
        except NotRunningError:
            raise
        except UsageError as error:
            return Result(False, None, str(error))

    async def _switch(self, change: SwitchRole) -> Result:
        answer = await self._world.switch(change.watcher, change.to)
        if answer.refused is not None:
            return Result(False, change.watcher, f"{change.watcher} stays in the role {answer.role}: {answer.refused}")
        return Result(True, change.watcher, f"in the role {answer.role}")

    async def _reconcile(self) -> tuple[str, ...]:
        self._world.check()
        state = await asyncio.to_thread(self._world.books.read)
        # After the state: a claim precedes its watcher.
        statuses = await self._world.watchers.statuses()
        notes = [await self._end_stray(name) for name in unclaimed(state, statuses) if _is_ours(state, name)]
        state, released = await self._release(statuses)
        notes += released
        for name in in_phase(state, "retiring"):
            await self._down.finish(name)
            notes.append(f"{name} was left retiring: it has ended")
        for name in in_phase(state, "restarting"):
            notes.append(f"{name} was left restarting: {(await self._again.finish(name)).note}")
        for name in in_phase(state, "starting"):
            notes.append(f"{name} was left starting: {(await self._up.await_ready(name)).note}")
        return tuple(notes)

    async def _end_stray(self, name: str) -> str:
        await self._world.watchers.end(name, UNDO_S)
        await self._world.watchers.remove(name)
        return f"{name} had no claim: it has ended"

    async def _release(self, statuses: Mapping[str, str]) -> tuple[State, tuple[str, ...]]:
        notes: list[str] = []

        def released(state: State) -> State:
            after, found = reconcile(state, statuses)
            notes[:] = found
            return after

        return await asyncio.to_thread(self._world.books.update, released), tuple(notes)


def _is_ours(state: State, name: str) -> bool:
    """Whether the watcher is named as the server's own are. Others are somebody else's business."""
    try:
        return parse_watcher(name).namespace == state.namespace
    except ConfigError:
        return False
