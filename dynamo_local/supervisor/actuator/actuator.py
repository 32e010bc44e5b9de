"""The actuator: makes one change at a time of what runs. Nothing else adds, removes or restarts workers.

The planner, `dynamo scale`, `dynamo drain` and `dynamo restart` all go through it. Each step of a change leaves the
statefile and circus such that `reconcile` can tell what was under way, and finish it:

    claimed, no watcher          the start never happened: the claim is released
    starting, with a watcher     awaited, then settled, or undone
    retiring                     told to end again, awaited, released
    restarting                   told to end again, awaited, started again, awaited
    a watcher without a claim    ended and removed

Whoever holds the lock on changes is the only one to make any, so every mark that it finds was left behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from dynamo_local.core.errors import ConfigError, NotRunningError, SupervisorError, UsageError
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
from dynamo_local.supervisor.actuator.add import WorkerAddition
from dynamo_local.supervisor.actuator.ports import Ports, Result
from dynamo_local.supervisor.actuator.remove import WorkerRemoval
from dynamo_local.supervisor.actuator.restart import WorkerRestart
from dynamo_local.supervisor.server.blueprint import Blueprint
from state.model import State
from state.reconcile import reconcile, unclaimed
from state.transitions import in_phase


class LocalActuator:
    """The actuator of one running server (core.planning.actions.Actuator)."""

    def __init__(self, ports: Ports, blueprint: Blueprint, ready_deadline_s: float | None = None) -> None:
        ready_s = blueprint.ready_deadline_s if ready_deadline_s is None else ready_deadline_s
        self._ports = ports
        self._removal = WorkerRemoval(ports, blueprint.drain_deadline_s)
        self._addition = WorkerAddition(ports, blueprint, self._removal, ready_s)
        self._restart = WorkerRestart(ports, blueprint, self._addition, self._removal)

    async def apply(self, change: Action, limits: DeviceLimits) -> ActionOutcome:
        """Make one change, after finishing those that earlier processes have left.

        A call that is cancelled leaves the rest to the next `reconcile`, which the server makes within seconds.
        """
        try:
            async with self._ports.change_lock():
                for note in await self._reconcile():
                    self._ports.report.step(note)
                started = self._ports.clock()
                result = await self._make(change, limits)
                took_s = self._ports.clock() - started
        except NotRunningError as error:
            raise _ended_meanwhile() from error
        return ActionOutcome(change, result.done, result.watcher, result.note, took_s)

    async def reconcile(self) -> tuple[str, ...]:
        """Finish changes that were left half done, and return a note for each. Waits for the lock on changes, and for
        workers that were left starting."""
        try:
            async with self._ports.change_lock():
                return await self._reconcile()
        except NotRunningError as error:
            raise _ended_meanwhile() from error

    async def _make(self, change: Action, limits: DeviceLimits) -> Result:
        try:
            match change:
                case AddWorker():
                    return await self._addition.add(change, limits)
                case RemoveWorker():
                    return await self._removal.remove(change)
                case Restart():
                    return await self._restart.restart(change, limits)
                case SwitchRole():
                    return await self._switch_role(change)
        except NotRunningError:
            raise
        except UsageError as error:
            return Result(False, None, str(error))

    async def _switch_role(self, change: SwitchRole) -> Result:
        answer = await self._ports.change_role(change.watcher, change.to)
        if answer.refused is not None:
            return Result(False, change.watcher, f"{change.watcher} stays in the role {answer.role}: {answer.refused}")
        return Result(True, change.watcher, f"in the role {answer.role}")

    async def _reconcile(self) -> tuple[str, ...]:
        self._ports.check_changeable()
        state = await asyncio.to_thread(self._ports.store.read)
        # After the state: a claim precedes its watcher.
        statuses = await self._ports.watchers.statuses()
        notes = [await self._end_unclaimed(name) for name in unclaimed(state, statuses) if _is_ours(state, name)]
        state, released = await self._release_dead(statuses)
        notes += released
        for name in in_phase(state, "retiring"):
            await self._removal.finish(name)
            notes.append(f"{name} was left retiring: it has ended")
        for name in in_phase(state, "restarting"):
            notes.append(f"{name} was left restarting: {(await self._restart.finish(name)).note}")
        for name in in_phase(state, "starting"):
            notes.append(f"{name} was left starting: {(await self._addition.await_ready(name)).note}")
        return tuple(notes)

    async def _end_unclaimed(self, name: str) -> str:
        await self._removal.end_unclaimed(name)
        return f"{name} had no claim: it has ended"

    async def _release_dead(self, statuses: Mapping[str, str]) -> tuple[State, tuple[str, ...]]:
        """Release claims without a watcher. Returns the new state and a note for each."""
        notes: list[str] = []

        def released(state: State) -> State:
            after, found = reconcile(state, statuses)
            notes[:] = found
            return after

        return await asyncio.to_thread(self._ports.store.update, released), tuple(notes)


def _is_ours(state: State, name: str) -> bool:
    """Whether the watcher has a name that this server gives. A user may have added others to circus."""
    try:
        return parse_watcher(name).namespace == state.namespace
    except ConfigError:
        return False


def _ended_meanwhile() -> SupervisorError:
    return SupervisorError("the server has ended meanwhile", "`dynamo ls` shows the servers that run")
