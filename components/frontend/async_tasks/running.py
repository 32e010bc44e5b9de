"""One asynchronous task that this frontend has in hand: its model is asked until there is a result."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from components.frontend.http.callers import Caller
from components.frontend.http.own_requests import AGAIN, FAULTS, Answered, ask, backoff_s
from dynamo_local.core.async_tasks.limits import TaskLimits
from dynamo_local.core.async_tasks.records import CANCELLED, Task, TaskResult, failure
from dynamo_local.core.http.asgi import App
from dynamo_local.tasks import finish_in_thread
from state.async_tasks.store import TakenTask

_UNKNOWN_MODEL_S = 120.0
"""Time for which the model of a task may be unknown: after a restart, endpoints come one by one."""

MAX_RESULT_BYTES = 32 * 1024 * 1024
"""Size of a result beyond which a task has failed."""


@dataclass(frozen=True)
class Surroundings:
    """What tasks are run with. `answer`: has a request answered as if its caller had sent it just now. `caller`: who an
    owner is now; None: the key is gone."""

    answer: App
    caller: Callable[[str], Caller | None]
    limits: TaskLimits
    wall_clock: Callable[[], float] = time.time


class RunningTask:
    """A task from where it was left to its end. Raises StateError, DecodeError; others go on with it then."""

    def __init__(self, taken: TakenTask, around: Surroundings, cancelled: asyncio.Event) -> None:
        """`cancelled`: set when nobody wants the result any more."""
        self._taken = taken
        self._around = around
        self._cancelled = cancelled

    async def run(self) -> None:
        """Bring the task to its end."""
        task = await finish_in_thread(self._taken.read)
        if task.result is None:
            if not task.is_started and not self._cancelled.is_set():
                await finish_in_thread(self._taken.note_start)
            result = self._cancellation() if self._cancelled.is_set() else await self._result(task)
            await finish_in_thread(lambda: self._taken.record(result))
        await finish_in_thread(self._taken.end)

    async def _result(self, task: Task) -> TaskResult:
        asking = asyncio.create_task(self._answer(task), name=f"answer to {task.head.task}")
        cancelled = asyncio.create_task(self._cancelled.wait(), name=f"end of {task.head.task}")
        try:
            await asyncio.wait({asking, cancelled}, return_when=asyncio.FIRST_COMPLETED)
            now = self._around.wall_clock()
            if not asking.done():
                return self._cancellation()
            status, body = asking.result()
            if len(body) > MAX_RESULT_BYTES:
                return failure(500, f"the result has {len(body)} bytes, at most {MAX_RESULT_BYTES} are kept", now)
            return TaskResult(status, body, int(now))
        finally:
            cancelled.cancel()
            asking.cancel()
            await asyncio.wait({asking})

    def _cancellation(self) -> TaskResult:
        return failure(CANCELLED, "the task was cancelled", self._around.wall_clock())

    async def _answer(self, task: Task) -> Answered:
        """Ask until there is an answer that does not say to try again, or the task's time is over."""
        faults, tries, begun = 0, 0, time.monotonic()
        while True:
            answer = await self._ask_once(task)
            waited_s = time.monotonic() - begun
            faults += answer.status == 500
            if not self._is_to_be_tried_again(answer.status, faults, waited_s):
                return answer
            tries += 1
            await asyncio.sleep(backoff_s(tries))

    async def _ask_once(self, task: Task) -> Answered:
        caller = self._around.caller(self._taken.owner)
        if caller is None:
            return Answered(401, b'{"error":{"message":"the key of the task was revoked, or has expired"}}')
        return await ask(self._around.answer, caller, task.head.path, task.body, task.head.priority)

    def _is_to_be_tried_again(self, status: int, faults: int, waited_s: float) -> bool:
        if status == 404:
            return waited_s < _UNKNOWN_MODEL_S
        if status == 500:
            return faults < FAULTS
        return status in AGAIN and waited_s < self._around.limits.task_patience_s
