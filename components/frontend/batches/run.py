"""Runs one batch: checks its input, asks for each line, records each answer, and makes files of the results.

What is recorded is on the disk. So whoever takes the batch after a kill goes on with the lines that have no result; a
line that was in flight is computed again.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from components.frontend.batches.lines import InputReader, Wanted, check_input, parts_of
from components.frontend.batches.pacing import Pacer
from components.frontend.batches.recording import Recorder
from components.frontend.http.callers import Caller
from components.frontend.http.models import ModelEntry, ModelTable
from components.frontend.http.own_requests import AGAIN, FAULTS, Answered, ask, backoff_s
from dynamo_local.core.http.asgi import App
from dynamo_local.core.http.bounds.admission import Refusal, examine, read_fields
from dynamo_local.core.stored.batches import BATCH_PRIORITY, BatchLimits, BatchState, LineError, Status
from dynamo_local.core.stored.files import BATCH_OUTPUT
from dynamo_local.core.stored.lines import Line, LineChecks, answered_line, unasked_line
from dynamo_local.tasks import finish_in_thread
from state.stored.batches import BatchFolder
from state.stored.files import FileDescription, FileStore

_LOOK_EVERY_S = 0.5
"""Between two looks whether the batch is cancelled, or its time over."""

_SHOW_EVERY_S = 1.0

_UNASKED: dict[Status, tuple[str, str]] = {
    "expired": ("batch_expired", "This request could not be executed before the completion window expired."),
    "cancelled": ("batch_cancelled", "This batch was cancelled before the request was executed."),
}

_NO_INPUT = LineError(
    "input_missing",
    "the input of the batch is gone: it ended while it was copied, and its output may be among the files",
)


@dataclass(frozen=True)
class Surroundings:
    """What batches are run with. `answer`: has a request of the frontend itself answered, of the caller in its scope.
    `caller`: who an owner is now; None: the key is gone."""

    answer: App
    models: ModelTable
    pacer: Pacer
    files: FileStore
    limits: BatchLimits
    max_body_bytes: int
    caller: Callable[[str], Caller | None]
    wall_clock: Callable[[], float] = time.time


class BatchRun:
    """One batch that this process runs."""

    def __init__(self, folder: BatchFolder, around: Surroundings) -> None:
        self._folder = folder
        self._around = around
        self._order = folder.order
        self._state = BatchState()
        self._shown_at = 0.0
        self._at_once = around.limits.max_batch_requests
        self._recorder = Recorder(folder.results, folder.order.id, self._count)
        self._dirty = False
        self._asks: Counter[ModelEntry] = Counter()
        """Lines that are in flight, or wait for their turn, by model."""

    @property
    def is_stalled(self) -> bool:
        """Whether nothing of the batch goes on, because the models of its next lines have no worker."""
        return bool(self._asks) and all(entry.unready() is not None for entry in self._asks)

    async def run(self) -> None:
        """Run the batch to its end. Raises StateError; it can be run again then, as after a cancellation."""
        await finish_in_thread(self._folder.results.open)
        self._state = (await finish_in_thread(self._folder.batch)).state
        self._count()
        if self._state.status in ("validating", "in_progress") and not await finish_in_thread(
            self._folder.input.exists
        ):
            await self._become(status="failed", failed_at=self._now(), errors=(_NO_INPUT,))
        if self._state.status == "validating":
            await self._validate()
        if self._state.status == "in_progress":
            await self._finish(await self._run_lines())
        if self._state.status == "finalizing":
            await self._finalize()

    # Validation

    async def _validate(self) -> None:
        order, around = self._order, self._around
        checks = LineChecks(order.endpoint, self._judge)
        path, limits = self._folder.input, around.limits
        total, errors = await finish_in_thread(
            lambda: check_input(path, checks, limits.max_batch_lines, around.max_body_bytes)
        )
        now = self._now()
        if errors:
            await self._become(status="failed", failed_at=now, errors=errors)
        else:
            await self._become(status="in_progress", in_progress_at=now, total=total)

    def _judge(self, fields: dict[str, Any]) -> Refusal | None:
        caller = self._around.caller(self._order.owner)
        if caller is None:
            return Refusal(401, "the key of the batch is gone, or has expired", "AuthenticationError")
        entry = self._around.models.asked(fields, self._order.endpoint, caller.allows)
        if isinstance(entry, Refusal):
            return entry
        demand = examine(fields, entry.limits)
        return demand if isinstance(demand, Refusal) else None

    # Lines

    async def _run_lines(self) -> Status:
        """Ask for all lines without a result. Return what the batch has become."""
        async with asyncio.TaskGroup() as group:
            recording = group.create_task(self._recorder.run(), name=f"results of {self._order.id}")
            asking = group.create_task(self._ask_all(), name=f"lines of {self._order.id}")
            outcome: Status | None = None
            while outcome is None:
                await asyncio.wait({asking}, timeout=_LOOK_EVERY_S)
                outcome = "completed" if asking.done() else await self._broken_off()
                await self._show()
            asking.cancel()
            await asyncio.wait({asking})
            # A line whose answer is being written has been asked.
            await self._recorder.settled()
            if outcome in _UNASKED:
                await self._record_unasked(outcome)
            recording.cancel()
        return outcome

    async def _broken_off(self) -> Status | None:
        """Return as what the batch ends although lines have no result; None: it goes on."""
        batch = await finish_in_thread(self._folder.batch)
        if batch.cancelling_at is not None or self._around.caller(self._order.owner) is None:
            return "cancelled"
        return "expired" if self._now() >= self._order.expires_at else None

    async def _ask_all(self) -> None:
        parts = await finish_in_thread(lambda: parts_of(self._folder.input))
        async with asyncio.TaskGroup() as group:
            for wanted in parts:
                group.create_task(self._ask_part(wanted), name=f"part of {self._order.id}")

    async def _ask_part(self, wanted: Wanted) -> None:
        """Ask for the lines whose models are wanted."""
        reader, room = InputReader(self._folder.input, wanted), asyncio.Semaphore(self._at_once)
        try:
            async with asyncio.TaskGroup() as group:
                while lines := await finish_in_thread(lambda: reader.next(self._folder.results.done)):
                    for line in lines:
                        await room.acquire()
                        asked = group.create_task(self._ask(line), name=f"line {line.number} of {self._order.id}")
                        asked.add_done_callback(lambda _: room.release())
        finally:
            reader.close()

    async def _ask(self, line: Line) -> None:
        answer = await self._answer(line)
        text = answered_line(_result_id(), line.custom_id, answer.status, answer.body)
        await self._recorder.record(line.custom_id, text, answered=answer.status < 400)

    async def _answer(self, line: Line) -> Answered:
        """Ask until there is an answer that does not say to try again."""
        fields = read_fields(line.body)
        assert not isinstance(fields, Refusal), "the line was checked"
        faults, tries = 0, 0
        while True:
            answer = await self._ask_once(line, fields)
            faults += answer.status == 500
            if answer.status not in AGAIN and not (answer.status == 500 and faults < FAULTS):
                return answer
            tries += 1
            await asyncio.sleep(backoff_s(tries))

    async def _ask_once(self, line: Line, fields: dict[str, Any]) -> Answered:
        around, wakes = self._around, self._order.wakes(self._around.limits.batches_wake)
        while True:
            caller = around.caller(self._order.owner)
            if caller is None:
                # The batch is about to be cancelled for that.
                return Answered(503, b"")
            entry = around.models.asked(fields, line.url, caller.allows)
            if isinstance(entry, Refusal):
                return Answered(entry.status, entry.body())
            with self._counted(entry):
                async with around.pacer.turn(entry, wakes=wakes):
                    # The model may have become another one meanwhile, or have lost its workers.
                    now = around.models.asked(fields, line.url, caller.allows)
                    if now is entry and (wakes or not entry.unready()):
                        return await ask(around.answer, caller, line.url, line.body, BATCH_PRIORITY)

    @contextmanager
    def _counted(self, entry: ModelEntry) -> Iterator[None]:
        self._asks[entry] += 1
        try:
            yield
        finally:
            self._asks[entry] -= 1
            if not self._asks[entry]:
                # A model that is gone is not kept.
                del self._asks[entry]

    async def _record_unasked(self, outcome: Status) -> None:
        code, message = _UNASKED[outcome]
        reader = InputReader(self._folder.input)
        try:
            while lines := await finish_in_thread(lambda: reader.next(self._folder.results.done)):
                made = [(line.custom_id, unasked_line(_result_id(), line.custom_id, code, message)) for line in lines]
                async with asyncio.TaskGroup() as group:
                    for custom_id, text in made:
                        group.create_task(self._recorder.record(custom_id, text, answered=False))
        finally:
            reader.close()

    # The end

    async def _finish(self, outcome: Status) -> None:
        """Note how the batch ends, before it has: whoever goes on after a kill ends it the same way."""
        results = self._folder.results
        await self._become(
            status="finalizing",
            finalizing_at=self._now(),
            ends_as=outcome,
            output_file_id=f"file-{secrets.token_hex(12)}" if results.completed else None,
            error_file_id=f"file-{secrets.token_hex(12)}" if results.failed else None,
        )

    async def _finalize(self) -> None:
        results, order, files, now = self._folder.results, self._order, self._around.files, self._now()

        def adopt() -> None:
            for file_id, path, name in (
                (self._state.output_file_id, results.output, "output"),
                (self._state.error_file_id, results.errors, "error"),
            ):
                if file_id is not None:
                    filename = f"{order.id}_{name}.jsonl"
                    described = FileDescription(order.owner, filename, BATCH_OUTPUT, order.output_expires_after_s)
                    files.adopt(path, file_id, described, now)

        await finish_in_thread(adopt)
        outcome = self._state.ends_as or "completed"
        await self._become(status=outcome, **{f"{outcome}_at": self._now()})
        await finish_in_thread(self._folder.clear)

    # The state

    def _now(self) -> int:
        return int(self._around.wall_clock())

    def _count(self) -> None:
        """Take over how many lines have results."""
        results = self._folder.results
        self._state = msgspec.structs.replace(
            self._state, completed=results.completed, failed=results.failed, usage=results.usage
        )
        self._dirty = True

    async def _show(self) -> None:
        """Write how far the batch is, now and then: a kill may lose that, since results are counted anew."""
        if self._dirty and time.monotonic() >= self._shown_at + _SHOW_EVERY_S:
            self._dirty, self._shown_at, state = False, time.monotonic(), self._state
            await finish_in_thread(lambda: self._folder.write(state))

    async def _become(self, **changes: Any) -> None:
        self._state = msgspec.structs.replace(self._state, **changes)
        await finish_in_thread(lambda: self._folder.write(self._state))


def _result_id() -> str:
    return f"batch_req_{secrets.token_hex(12)}"
