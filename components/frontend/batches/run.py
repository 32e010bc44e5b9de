"""Batches from being taken to their end: their input is checked, each line asked for, each answer recorded, and files
made of the results.

Of several frontends, one has a batch at a time; another one takes it when that one has ended. What is recorded is on
the disk. So whoever takes the batch after a kill goes on with the lines that have no result; a line that was in flight
is computed again."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from components.frontend.batches.pacing import Pacer
from components.frontend.http.callers import Caller
from components.frontend.http.models import ModelEntry, ModelTable
from components.frontend.http.own_requests import AGAIN, FAULTS, Answered, ask, backoff_s
from dynamo_local.core.errors import StateError
from dynamo_local.core.http.asgi import App
from dynamo_local.core.http.bounds.admission import Refusal, examine, read_fields
from dynamo_local.core.stored.batches import BATCH_PRIORITY, MOST_ERRORS, BatchLimits, BatchState, LineError, Status
from dynamo_local.core.stored.files import BATCH_OUTPUT
from dynamo_local.core.stored.lines import (
    NOT_UTF8,
    Line,
    LineChecks,
    LineRefusedError,
    answered_line,
    model_of,
    read_line,
    unasked_line,
)
from dynamo_local.log_once import LogOnce
from dynamo_local.tasks import finish_in_thread
from state.files import system_errors
from state.stored.batches import BatchFolder, BatchStore
from state.stored.files import FileDescription, FileStore
from state.stored.results import Results

_log = logging.getLogger(__name__)

AT_ONCE = 4
"""Batches that a frontend runs at the same time, the oldest first, beside those whose models have no worker."""

MOST = 32
"""Batches that a frontend has at the same time, those included."""

LOOK_EVERY_S = 1.0
_SWEEP_EVERY_S = 60.0
_AGAIN_S = 5.0


class BatchKeeper:
    """Runs the batches of one server, as far as this frontend has them."""

    def __init__(self, store: BatchStore, around: Surroundings) -> None:
        self._store = store
        self._around = around
        self._running: dict[str, asyncio.Task[None]] = {}
        self._runs: dict[str, BatchRun] = {}
        self._log_once = LogOnce(_log)
        self._stopping = False
        self._sweep_at = 0.0

    async def run(self) -> None:
        """Look for batches again and again, until cancelled."""
        pacing = asyncio.create_task(self._around.pacer.run(), name="pace of batches")
        try:
            while not self._stopping:
                try:
                    await self._take_new()
                    await self._sweep()
                    self._log_once.clear()
                except StateError as error:
                    self._log_once.warn(f"batches wait: {error}")
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            pacing.cancel()
            await self.stop()

    async def stop(self) -> None:
        """Leave all batches to others, at once: what is recorded stays."""
        self._stopping = True
        running = list(self._running.values())
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)

    async def _take_new(self) -> None:
        if not self._has_room():
            return
        for batch_id in await finish_in_thread(self._store.under_way):
            if not self._has_room() or self._stopping:
                return
            if batch_id not in self._running:
                folder = await finish_in_thread(partial(self._store.take, batch_id))
                if folder is not None:
                    self._begin(folder)

    def _has_room(self) -> bool:
        busy = sum(name not in self._runs or not self._runs[name].is_stalled for name in self._running)
        return busy < AT_ONCE and len(self._running) < MOST

    def _begin(self, folder: BatchFolder) -> None:
        batch_id = folder.order.id
        task = asyncio.create_task(self._run(folder), name=f"batch {batch_id}")
        self._running[batch_id] = task
        task.add_done_callback(lambda _: self._running.pop(batch_id, None))

    async def _run(self, folder: BatchFolder) -> None:
        """Run a batch, and leave it to whoever takes it next if that fails."""
        run = self._runs[folder.order.id] = BatchRun(folder, self._around)
        try:
            await run.run()
        except* StateError as errors:
            _log.warning("%s is broken off, and goes on later: %s", folder.order.id, _first_of(errors))
            await asyncio.sleep(_AGAIN_S)
        except* Exception:  # noqa: BLE001
            # The boundary of a batch: what is wrong with one must not end the process, and so all requests.
            _log.exception("%s is broken off, and goes on later", folder.order.id)
            await asyncio.sleep(_AGAIN_S)
        finally:
            del self._runs[folder.order.id]
            await finish_in_thread(folder.release)

    async def _sweep(self) -> None:
        if time.monotonic() >= self._sweep_at:
            self._sweep_at = time.monotonic() + _SWEEP_EVERY_S
            await finish_in_thread(lambda: self._store.sweep(self._around.wall_clock()))


def _first_of(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return an error of a group, and not of groups alone."""
    first: BaseException = errors
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first


# One batch.

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


# Records results: those that come while others are being written go to the disk together with the next.

_WRITE_AGAIN_S = 5.0
"""Before results that could not be written are written again, in seconds."""


class Recorder:
    """Records the results of one batch. `on_recorded` is called whenever some are on the disk."""

    def __init__(self, results: Results, batch_id: str, on_recorded: Callable[[], None]) -> None:
        self._results = results
        self._on_recorded = on_recorded
        self._batch_id = batch_id
        self._answered: list[tuple[str, bytes]] = []
        self._failed: list[tuple[str, bytes]] = []
        self._changed = asyncio.Event()
        self._recorded = asyncio.Event()
        """Set when something was written; then there is another one."""
        self._writing = False
        self._log_once = LogOnce(_log)

    async def record(self, custom_id: str, line: bytes, *, answered: bool) -> None:
        """Return when the result is on the disk, however long that takes: a disk may be full for a while."""
        (self._answered if answered else self._failed).append((custom_id, line))
        self._changed.set()
        while custom_id not in self._results.done:
            await self._recorded.wait()

    async def settled(self) -> None:
        """Wait until all that was recorded is on the disk, also if nobody waits for it any more."""
        while self._writing or self._answered or self._failed:
            await self._recorded.wait()

    async def run(self) -> None:
        """Write what is recorded, until cancelled. What is being written then is written to the end."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._write()

    async def _write(self) -> None:
        answered, self._answered = self._answered, []
        failed, self._failed = self._failed, []
        self._writing = True
        try:
            await finish_in_thread(lambda: self._results.add(answered, failed))
            self._log_once.clear()
        except StateError as error:
            self._log_once.warn(f"results of {self._batch_id} wait: {error}")
            done = self._results.done
            self._answered[:0] = [each for each in answered if each[0] not in done]
            self._failed[:0] = [each for each in failed if each[0] not in done]
            await asyncio.sleep(_WRITE_AGAIN_S)
            self._changed.set()
        self._writing = False
        self._recorded.set()
        self._recorded = asyncio.Event()
        self._on_recorded()


# Reads the input of a batch a piece at a time, in threads, so that it is never in memory as a whole.

_AT_ONCE = 32
_PAUSE_S = 0.001
"""For other threads, between so many lines: whoever checks a large input must not keep the event loop waiting."""


Wanted = Callable[[str], bool]
"""Whether lines for a model of this name are wanted."""

_MOST_PARTS = 32


def parts_of(path: Path) -> list[Wanted]:
    """Divide the lines of an input by the models that they name, so that those for one need not wait for another. All
    models beyond so many are one part. Blocks. Raises DiskError."""
    reader = InputReader(path)
    try:
        names: dict[str, None] = {}
        while lines := reader.next(()):
            names.update(dict.fromkeys(map(model_of, lines)))
            time.sleep(_PAUSE_S)
    finally:
        reader.close()
    if len(names) <= 1:
        return [_any]
    apart = frozenset(list(names)[:_MOST_PARTS])
    parts: list[Wanted] = [name.__eq__ for name in apart]
    return parts if len(apart) == len(names) else [*parts, lambda name: name not in apart]


def _any(_: str) -> bool:
    return True


class InputReader:
    """Reads lines one piece after the other. Blocks."""

    def __init__(self, path: Path, wanted: Wanted = _any) -> None:
        """Raises DiskError."""
        self._number = 0
        self._wanted = wanted
        with system_errors(f"cannot read {path}"):
            self._file = path.open("rb")

    def next(self, done: Collection[str]) -> list[Line]:
        """Return the next lines of those that are not done; none at the end. Raises DiskError."""
        found: list[Line] = []
        with system_errors("cannot read the input of a batch"):
            while len(found) < _AT_ONCE and (text := self._file.readline()):
                self._number += 1
                if self._number % _AT_ONCE == 0:
                    time.sleep(_PAUSE_S)
                if text.isspace() or (line := read_line(self._number, text)).custom_id in done:
                    continue
                if self._wanted is _any or self._wanted(model_of(line)):
                    found.append(line)
        return found

    def close(self) -> None:
        """Close the input."""
        self._file.close()


def check_input(path: Path, checks: LineChecks, most_lines: int, most_bytes: int) -> tuple[int, tuple[LineError, ...]]:
    """Check all lines of an input. Returns their number, and what is wrong with the first wrong ones. Raises DiskError.

    `most_bytes`: in a line.
    """
    errors: list[LineError] = []
    total = 0
    for number, text in _numbered(path, most_bytes):
        if len(text.removesuffix(b"\n").removesuffix(b"\r")) > most_bytes:
            why = f"line {number}: it is longer than {most_bytes} bytes (setting max-body-bytes)"
            return total, (*errors, LineError("invalid_request", why, None, number))
        if text.isspace():
            continue
        total += 1
        if total > most_lines:
            why = f"there are more than {most_lines} lines (setting max-batch-lines)"
            return total, (*errors, LineError("too_many_lines", why, None, number))
        try:
            checks.check(number, text)
        except LineRefusedError as error:
            errors.append(error.error)
        if len(errors) >= MOST_ERRORS or (errors and errors[-1].code == NOT_UTF8):
            break
        if total % _AT_ONCE == 0:
            time.sleep(_PAUSE_S)
    if not total:
        errors.append(LineError("empty_file", "the input file has no lines"))
    return total, tuple(errors)


def _numbered(path: Path, most_bytes: int) -> Iterator[tuple[int, bytes]]:
    with system_errors(f"cannot read {path}"), path.open("rb") as file:
        number = 0
        while text := file.readline(most_bytes + len(b"\r\n")):
            number += 1
            yield number, text
