"""Writes the journals of all answers of a frontend in batches, in a thread: each is shown when it is on the disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from dynamo_local.core.errors import StateError
from dynamo_local.tasks import finish_in_thread
from state.answers.journal import AnswerJournal

BATCH_S = 0.03
"""Time for which records are collected. With the time that a disk takes, they are shown within a tenth of a second."""

MAX_JOURNAL_BYTES = 64 * 1024 * 1024
"""Size at which an answer is ended."""


class BatchedJournal:
    """A journal whose records are written in batches. `failure`: why they cannot be; nothing is written then any more.

    `on_failure` is called with it, once.
    """

    def __init__(self, journal: AnswerJournal, writer: AnswerWriter) -> None:
        self.journal = journal
        self.on_failure: Callable[[], None] = lambda: None
        self.failure: StateError | None = None
        self._writer = writer
        self._pending = bytearray()
        self._batch: asyncio.Future[None] | None = None
        """What is to be done when that is written."""
        self._last: asyncio.Future[None] | None = None
        """The same for what was added last."""

    @property
    def is_full(self) -> bool:
        """Whether there is more than an answer may have."""
        return self.journal.size + len(self._pending) > MAX_JOURNAL_BYTES

    def add(self, data: bytes) -> None:
        """Have records written."""
        if self._batch is None:
            self._batch = asyncio.get_running_loop().create_future()
        self._pending += data
        self._last = self._batch
        self._writer.note(self)

    async def flushed(self) -> None:
        """Wait until what was added is on the disk, or is known never to be."""
        if self._last is not None:
            await asyncio.shield(self._last)

    def take(self) -> tuple[bytes, asyncio.Future[None] | None]:
        """Take what is to be written, with what is to be done then."""
        data, batch = bytes(self._pending), self._batch
        self._pending, self._batch = bytearray(), None
        return data, batch

    def write(self, data: bytes) -> StateError | None:
        """Write in the thread. Returns why that failed."""
        if self.failure is not None:
            return self.failure
        try:
            self.journal.write(data)
        except StateError as error:
            return error
        return None

    def written(self, failure: StateError | None) -> None:
        """Take the outcome of a write."""
        first, self.failure = self.failure is None, self.failure or failure
        if first and failure is not None:
            self.on_failure()


class AnswerWriter:
    """Writes the journals of one frontend."""

    def __init__(self) -> None:
        self._dirty: dict[BatchedJournal, None] = {}
        self._wake = asyncio.Event()
        self._writing = asyncio.Lock()

    def note(self, journal: BatchedJournal) -> None:
        """Note that the journal has something to be written."""
        self._dirty[journal] = None
        self._wake.set()

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await self._wake.wait()
            await asyncio.sleep(BATCH_S)
            await self.write()

    async def write(self) -> None:
        """Write what there is."""
        async with self._writing:
            await self._write()

    async def _write(self) -> None:
        self._wake.clear()
        dirty, self._dirty = self._dirty, {}
        batches = [(journal, *journal.take()) for journal in dirty]
        failures = await finish_in_thread(lambda: [journal.write(data) for journal, data, _ in batches])
        for (journal, _, batch), failure in zip(batches, failures, strict=True):
            journal.written(failure)
            if batch is not None:
                batch.set_result(None)
