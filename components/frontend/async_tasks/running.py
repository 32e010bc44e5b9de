"""Brings an asynchronous task that this frontend has in hand to its end: its model is asked until there is a result."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple, TypeVar

from components.frontend.async_tasks.calling import Calling
from components.frontend.http.callers import Caller
from components.frontend.http.own_requests import AGAIN, FAULTS, UNKNOWN_MODEL_S, Answered, ask, backoff_s
from dynamo_local.core.async_tasks.callbacks import left_s, pause_s
from dynamo_local.core.async_tasks.records import CANCELLED, Call, Task, TaskHead, TaskLimits, TaskResult, failure
from dynamo_local.core.http.asgi import App
from dynamo_local.tasks import finish_in_thread
from state.async_tasks.store import TakenTask

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

_NO_ROOM = "there is no room: tasks of the key have as many as they may (setting max-task-bytes); delete some"

MAX_RESULT_BYTES = 32 * 1024 * 1024
"""Size of a result beyond which a task has failed."""


@dataclass(frozen=True)
class Surroundings:
    """What tasks are run with. `answer`: has a request answered as if its caller had sent it just now. `caller`: who an
    owner is now; None: the key is gone. `receivers`: calls those who are to know a result.
    `pause_s`: for how long to wait after so many calls; None: there is no further one."""

    answer: App
    caller: Callable[[str], Caller | None]
    limits: TaskLimits
    receivers: Calling
    wall_clock: Callable[[], float] = time.time
    pause_s: Callable[[int], float | None] = pause_s
    room: Callable[[str, int], int] = lambda _, most: most
    """Returns how many tasks may be in flight for a model, at most so many."""
    on_taken: Callable[[], None] = lambda: None
    """Called when tasks were taken that wait for a model, or put down: they are requests in flight now, or wait."""

    def left_s(self, calls: Sequence[Call]) -> float:
        """Return how many seconds are left until the receiver of a task is to be called next."""
        return left_s(calls, self.wall_clock(), self.pause_s)


class Rest(NamedTuple):
    """What is left of a task: it is to be gone on with after `pause_s` seconds. `answered`: its head, when it has its
    result, and its receiver is to be called."""

    pause_s: float
    answered: TaskHead | None = None


class RunningTask:
    """A task from where it was left to where it has to wait. Raises StateError, DecodeError; others go on then.
    `outcome`: what the answer of its model tells of others, if it was asked."""

    def __init__(self, taken: TakenTask, around: Surroundings, tries: Tries, cancelled: asyncio.Event) -> None:
        """`cancelled`: set when nobody wants the result any more."""
        self.outcome = Outcome.OTHER
        self._taken = taken
        self._around = around
        self._tries = tries
        self._cancelled = cancelled

    async def run(self, *, may_call: bool) -> Rest | None:
        """Have the task's model asked, or its receiver called, once. Returns what is left of it; None: it has ended.

        `may_call`: it was taken to be called. Else another frontend may have had it answered meanwhile.
        """
        is_unwanted = self._cancelled.is_set()
        if not is_unwanted:
            await self._record_call()
        task = await finish_in_thread(self._taken.read)
        if task.result is None:
            if not task.is_started and not is_unwanted:
                await finish_in_thread(self._taken.note_start)
            result = self._cancellation() if is_unwanted else await self._result(task)
            if isinstance(result, float):
                return Rest(result)
            await finish_in_thread(lambda: self._taken.record(result))
            pause = 0.0 if task.head.callback_url and not self._cancelled.is_set() else None
        elif is_unwanted or task.has_ended:
            pause = None
        else:
            # Another frontend may have called meanwhile.
            left = self._around.left_s(task.calls)
            pause = await self._call(task) if may_call and not left else left
        if pause is None:
            await finish_in_thread(self._taken.end)
            return None
        return Rest(pause, task.head)

    async def _call(self, task: Task) -> float | None:
        """Call the receiver. Returns after how many seconds it is to be called again; None: never."""
        made = await self._unless_cancelled(self._around.receivers.attempt(self._taken.owner, task), task)
        if made is None:
            return None
        pause = None if made.is_last else self._around.pause_s(len(task.calls) + 1)
        self._tries.unwritten = Call(made.outcome, made.is_delivered, pause is None, int(self._around.wall_clock()))
        await self._record_call()
        if not made.is_delivered:
            what = "and is called no more" if pause is None else f"and is called again in {pause:g} s"
            _log.warning("the receiver of %s has not taken its result (%s), %s", task.head.task, made.outcome, what)
        return pause

    async def _record_call(self) -> None:
        """Record the call that was made last, if it is not yet."""
        if (call := self._tries.unwritten) is not None:
            await finish_in_thread(lambda: self._taken.note_call(call))
            self._tries.unwritten = None

    async def _result(self, task: Task) -> TaskResult | float:
        """Return the result, or after how many seconds the model may be asked again."""
        self._tries.begin(time.monotonic())
        answer, now = await self._unless_cancelled(self._ask(task), task), self._around.wall_clock()
        if answer is None:
            return self._cancellation()
        self.outcome = outcome_of(answer)
        again = self._tries.note(answer, time.monotonic(), self._around.limits.task_patience_s)
        if again is not None:
            return again
        size = len(answer.body)
        if size > MAX_RESULT_BYTES:
            return failure(500, f"the result has {size} bytes, at most {MAX_RESULT_BYTES} are kept", now)
        if not await finish_in_thread(lambda: self._taken.has_room(size)):
            return failure(507, f"the result has {size} bytes, for which {_NO_ROOM}", now)
        return TaskResult(answer.status, answer.body, int(now))

    async def _unless_cancelled(self, work: Coroutine[Any, Any, _T], task: Task) -> _T | None:
        """Do something that takes time. Returns None as soon as nobody wants the result any more."""
        working = asyncio.create_task(work, name=f"work on {task.head.task}")
        cancelled = asyncio.create_task(self._cancelled.wait(), name=f"end of {task.head.task}")
        try:
            await asyncio.wait({working, cancelled}, return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else None
        finally:
            cancelled.cancel()
            working.cancel()
            await asyncio.wait({working})

    def _cancellation(self) -> TaskResult:
        return failure(CANCELLED, "the task was cancelled", self._around.wall_clock())

    async def _ask(self, task: Task) -> Answered:
        caller = self._around.caller(self._taken.owner)
        if caller is None:
            return Answered(401, b'{"error":{"message":"the key of the task was revoked, or has expired"}}')
        return await ask(self._around.answer, caller, task.head.path, task.body, task.head.priority)


# When a task whose answer is no result is tried again.

_UNKNOWN, _CLOSED, _REFUSED = 404, frozenset({404, 503}), 429


class Outcome(Enum):
    """What an answer to a task tells of the others of its line.

    `ANSWERED`: there is room. `REFUSED`: this one is over a limit (429), which another one, of fewer tokens or choices
    or of a higher priority, need not be. `CLOSED`: all would be refused, as there is no worker (503) or no model (404).
    """

    ANSWERED = auto()
    REFUSED = auto()
    CLOSED = auto()
    OTHER = auto()


def outcome_of(answer: Answered) -> Outcome:
    """Return what an answer tells, whether it is the task's result or not."""
    if answer.is_final:
        return Outcome.OTHER
    if answer.status in _CLOSED:
        return Outcome.CLOSED
    if answer.status == _REFUSED:
        return Outcome.REFUSED
    return Outcome.OTHER if answer.status == 500 or answer.status in AGAIN else Outcome.ANSWERED


@dataclass
class Tries:
    """What has come of a task in this frontend that is no result. Times are CLOCK_MONOTONIC, in s. `first_at`: since
    when it is tried, and no other of its line has had a result.

    It is not on the disk: a restart, and another frontend, begin anew. That gives a task more time, and never less.
    """

    first_at: float | None = None
    unknown_at: float | None = None
    faults: int = 0
    others: int = 0
    """Answers that were neither faults nor refusals."""
    unwritten: Call | None = None
    """A call of the receiver that could not be recorded: it is not to be made again for that."""

    def begin(self, now: float) -> None:
        """Note that the task is tried now."""
        if self.first_at is None:
            self.first_at = now

    def note_room(self, answered_at: float) -> None:
        """Note when another task of the line had its result: until then, this one waited for its turn alone."""
        if self.first_at is not None:
            self.first_at = max(self.first_at, answered_at)
        if self.unknown_at is not None and answered_at > self.unknown_at:
            self.unknown_at = None

    def note(self, answer: Answered, now: float, patience_s: float) -> float | None:
        """Note an answer. Returns after how many seconds the task may be tried again; None: the answer is the result.

        0 for a refusal: it is for the line of its owner to wait.
        """
        status = answer.status
        self.unknown_at = None if status != _UNKNOWN else self.unknown_at if self.unknown_at is not None else now
        self.faults += status == 500
        if answer.is_final or not self._is_tried_again(status, now, patience_s):
            return None
        if status == _REFUSED or status in _CLOSED:
            return 0.0
        self.others += status != 500
        return backoff_s(self.others + self.faults)

    def _is_tried_again(self, status: int, now: float, patience_s: float) -> bool:
        if self.unknown_at is not None:
            return now - self.unknown_at < UNKNOWN_MODEL_S
        if status == 500:
            return self.faults < FAULTS
        return status in AGAIN and now - (self.first_at if self.first_at is not None else now) < patience_s
