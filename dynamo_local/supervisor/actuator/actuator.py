"""The actuator: makes changes of what runs. Nothing else adds, removes or restarts workers.

The workers of each endpoint have one, and so have the processes that are no workers. They exist in the server alone.
Each step of a change leaves the statefile and circus such that `reconcile` can tell what was under way, and finish it:
steps.py has the table.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import reduce
from itertools import groupby
from typing import TypeVar, assert_never

from dynamo_local.core.errors import (
    ConfigError,
    DynamoError,
    NodeStartError,
    NotRunningError,
    SilentNodeError,
    SupervisorError,
    UsageError,
)
from dynamo_local.core.names import endpoint_of, parse_watcher
from dynamo_local.core.planning.actions import (
    Action,
    ActionOutcome,
    AddWorker,
    DeviceLimits,
    RemoveWorker,
    Restart,
    SwitchRole,
)
from dynamo_local.core.planning.decision import describe
from dynamo_local.supervisor.actuator.changes import UNDO_S, Ports, Result, WorkerChanges
from dynamo_local.supervisor.actuator.steps import (
    AwaitStart,
    EndUnclaimed,
    FinishRestarting,
    FinishRetiring,
    ReleaseClaim,
    ReleaseReservation,
    Step,
    next_steps,
    unclaimed,
)
from dynamo_local.supervisor.server.launch.blueprint import Blueprint
from dynamo_local.supervisor.server.launch.templates import WatcherPlan
from dynamo_local.tasks import side_by_side
from state.statefile.model import Component, State
from state.statefile.transitions import holding, release, remove_revision, retire

_T = TypeVar("_T")


class LocalActuator:
    """An actuator of a running server.

    `endpoint`: the endpoint whose workers it changes; empty for processes that are no workers. It sees no others, so
    that changes of two endpoints can be made at the same time.
    """

    def __init__(
        self, ports: Ports, blueprint: Blueprint, ready_deadline_s: float | None = None, endpoint: str = ""
    ) -> None:
        ready_s = blueprint.ready_deadline_s if ready_deadline_s is None else ready_deadline_s
        self._ports = ports
        self._books = ports.books
        self._blueprint = blueprint
        self._endpoint = endpoint
        self._changes = WorkerChanges(ports, blueprint, ready_s)

    async def apply(
        self, change: Action, limits: DeviceLimits, check: Callable[[], None] = lambda: None
    ) -> ActionOutcome:
        """Make one change, after finishing those that were left half done. `check`: raises if it is not to be made any
        more once its turn has come.

        A call that is cancelled leaves the rest to the next `reconcile`, which the server makes within seconds.
        """
        async with self._changing():
            await self._finish_what_is_left()
            check()
            started = self._ports.clock()
            result = await self._make(change, limits)
            return self._outcome(change, result, started)

    async def apply_all(self, changes: Sequence[Action], limits: DeviceLimits) -> list[ActionOutcome]:
        """Make several changes, and return their outcomes in the same order. A change that fails stops no other.

        All removals are made at the same time, then all additions, whose devices are claimed in the order given, then
        the others in turn. Cancelled, it leaves the rest as `apply` does.
        """
        async with self._changing():
            await self._finish_what_is_left()
            started = self._ports.clock()
            outcomes: dict[int, ActionOutcome] = {}

            async def make(number: int, work: Awaitable[Result], since: float = started) -> None:
                outcomes[number] = self._outcome(changes[number], await self._attempt(work), since)

            numbered = list(enumerate(changes))
            await side_by_side(
                make(n, self._make(each, limits)) for n, each in numbered if isinstance(each, RemoveWorker)
            )
            adding = self._ports.clock()
            additions = [(n, each) for n, each in numbered if isinstance(each, AddWorker)]
            claims = [(n, await self._attempt(self._claimed(each, limits))) for n, each in additions]
            await side_by_side(make(n, self._begun(claim), adding) for n, claim in claims)
            for n, each in numbered:
                if n not in outcomes:
                    await make(n, self._make(each, limits))
            return [outcomes[n] for n, _ in numbered]

    async def end_revision(self, revision: str) -> tuple[str, ...]:
        """End all processes of a revision of the endpoint at the same time, whatever is under way with them, then drop
        the revision's entries. Returns the watchers that were ended.

        Repeated after a crash or a cancellation at any step, it goes on. Raises SupervisorError if a process cannot be
        ended: its entry and its devices are kept.
        """
        self._check_revision(revision)
        async with self._changing():
            ended = await self._end_all(revision, lambda component: True)
            await self._books.update(lambda state: remove_revision(state, revision))
            return ended

    async def break_off(self, revision: str) -> tuple[str, ...]:
        """End the processes of a revision of the endpoint that were left starting, and leave the others. Returns the
        watchers that were ended. Repeated, and otherwise, as `end_revision`."""
        self._check_revision(revision)
        async with self._changing():
            return await self._end_all(revision, lambda component: component.phase == "starting")

    async def reconcile(self) -> tuple[str, ...]:
        """Finish changes that were left half done, and return a note for each. Waits for the lock on changes, and for
        workers that were left starting. Raises SilentNodeError if a change is left because its node does not answer,
        once all others are finished."""
        async with self._changing():
            notes, left = await self._finish()
            if left is None:
                return notes
            self._tell(notes)
            raise left

    def _check_revision(self, revision: str) -> None:
        if not revision or endpoint_of(revision) != self._endpoint:
            raise UsageError(f"{revision!r} is no revision of the endpoint {self._endpoint!r}")

    async def _end_all(self, revision: str, is_meant: Callable[[Component], bool]) -> tuple[str, ...]:
        """End processes of a revision at the same time, those without a claim included."""
        state = await self._books.read()
        # After the state: a claim precedes its watcher.
        statuses = await self._ports.places.statuses()
        mine = {n: c for n, c in state.components.items() if c.holds and c.revision == revision}
        meant = {name: component for name, component in mine.items() if is_meant(component)}
        strays = [n for n in unclaimed(state, statuses) if self._is_mine(n) and _revision_of(n) == revision]
        await self._books.update(lambda state: reduce(retire, meant, state))
        await side_by_side(
            [
                *(self._changes.finish_removal(n, UNDO_S if c.phase == "starting" else None) for n, c in meant.items()),
                *(self._changes.end_unclaimed(name) for name in strays),
            ]
        )
        return (*meant, *strays)

    @asynccontextmanager
    async def _changing(self) -> AsyncIterator[None]:
        if self._ports.lock.locked():
            self._ports.report.step("waiting for another change")
        try:
            async with self._ports.lock:
                yield
        except NotRunningError as error:
            raise _ended_meanwhile() from error

    async def _finish_what_is_left(self) -> None:
        # What is left on a node that does not answer is no reason to make no change elsewhere.
        notes, left = await self._finish()
        self._tell(notes if left is None else (*notes, f"a change is left unfinished for now: {left}"))

    async def _finish(self) -> tuple[tuple[str, ...], SilentNodeError | None]:
        """Finish changes that were left half done. Returns a note for each, and why another one is left as it is, if
        one is: its node does not answer. Raises SupervisorError for any other failure."""
        state = await self._books.read()
        # After the state: a claim precedes its watcher.
        statuses = await self._ports.places.statuses()
        places = (await self._ports.places.places()).values()
        reservations = [name for place in places for name in place.reserved]
        left: list[SilentNodeError] = []
        notes: list[str | None] = []
        for _, together in groupby(next_steps(state, statuses, reservations, self._is_mine), key=type):
            notes += await side_by_side(_unless_silent(self._take(step, left), left) for step in together)
        return tuple(note for note in notes if note is not None), left[0] if left else None

    async def _take(self, step: Step, left: list[SilentNodeError]) -> str:
        """Take a step, and return a note of it. `left`: gets what a node leaves unanswered that is no part of the
        note."""
        name = step.watcher
        match step:
            case EndUnclaimed():
                await self._changes.end_unclaimed(name)
                return f"{name} had no claim: it has ended"
            case ReleaseReservation():
                await self._changes.end_unclaimed(name)
                return f"{name} was reserved and not claimed: its devices are free"
            case ReleaseClaim(devices=devices):
                await self._books.update(lambda state: _without_claim(state, name))
                await _unless_silent(self._ports.places.release(name), left)
                held = f"devices {list(devices)}" if devices else "no device"
                return f"{name} has no process: its claim ({held}) is released"
            case FinishRetiring():
                await self._changes.finish_removal(name)
                return f"{name} was left retiring: it has ended"
            case FinishRestarting():
                return f"{name} was left restarting: {(await self._changes.finish_restart(name)).note}"
            case AwaitStart():
                return f"{name} was left starting: {(await self._changes.await_ready(name)).note}"
            case _:
                assert_never(step)

    def _tell(self, notes: Sequence[str]) -> None:
        for note in notes:
            self._ports.report.step(note)

    async def _claimed(self, change: AddWorker, limits: DeviceLimits) -> WatcherPlan:
        self._check_mine(change)
        return await self._changes.claim(change, limits)

    async def _begun(self, claim: WatcherPlan | Result) -> Result:
        return claim if isinstance(claim, Result) else await self._changes.start(claim)

    async def _attempt(self, work: Awaitable[_T]) -> _T | Result:
        """The result of a change among others. One whose end is not known is finished by the next `reconcile`."""
        try:
            return await work
        except NotRunningError:
            raise
        except DynamoError as error:
            return Result(False, None, str(error), node_failed=isinstance(error, NodeStartError))

    def _outcome(self, change: Action, result: Result, started: float) -> ActionOutcome:
        took_s = self._ports.clock() - started
        return ActionOutcome(
            *(change, result.done, result.watcher, result.note, took_s),
            unexplained=result.unexplained,
            node_failed=result.node_failed,
        )

    async def _make(self, change: Action, limits: DeviceLimits) -> Result:
        try:
            self._check_mine(change)
            match change:
                case AddWorker():
                    return await self._changes.add(change, limits)
                case RemoveWorker():
                    return await self._changes.remove(change)
                case Restart():
                    return await self._changes.restart(change, limits)
                case SwitchRole():
                    return await self._switch_role(change)
        except NotRunningError:
            raise
        except UsageError as error:
            return Result(False, None, str(error))

    async def _switch_role(self, change: SwitchRole) -> Result:
        await self._ports.change_role(change.watcher, change.to)
        return Result(True, change.watcher, f"in the role {change.to}")

    def _is_mine(self, name: str) -> bool:
        """Whether the watcher has a name that this server gives to the processes that are changed here. A user may have
        added others to circus."""
        try:
            watcher = parse_watcher(name)
        except ConfigError:
            return False
        return watcher.namespace == self._ports.namespace and self._blueprint.endpoint_of(watcher) == self._endpoint

    def _check_mine(self, change: Action) -> None:
        """Raise UsageError for a change of workers that others change."""
        is_mine = (
            endpoint_of(change.revision) == self._endpoint
            if isinstance(change, AddWorker)
            else self._is_mine(change.watcher)
        )
        if not is_mine:
            whose = f"the workers of endpoint {self._endpoint}" if self._endpoint else "processes that are no workers"
            raise UsageError(f"cannot {describe(change)} among {whose}")


def _revision_of(watcher: str) -> str:
    """The revision in a watcher's name; empty also for what is no watcher's name, which is refused elsewhere."""
    try:
        return parse_watcher(watcher).revision
    except ConfigError:
        return ""


def _ended_meanwhile() -> SupervisorError:
    return SupervisorError("the server has ended meanwhile", "`dynamo ls` shows the servers that run")


async def _unless_silent(work: Awaitable[_T], left: list[SilentNodeError]) -> _T | None:
    """The result of a work; None for what its node leaves unanswered, for which others are not to wait."""
    try:
        return await work
    except SilentNodeError as error:
        left.append(error)
        return None


def _without_claim(state: State, watcher: str) -> State:
    """The claim may be lost with a damaged statefile."""
    return release(state, watcher) if watcher in holding(state) else state
