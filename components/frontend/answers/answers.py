"""The answers that this frontend computes: begun for its clients, or taken over from frontends that have died."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping

from components.frontend.answers.kept_log import KeptLog
from components.frontend.answers.limits import AnswerLimits
from components.frontend.answers.running import RunningAnswer
from components.frontend.answers.writing import AnswerWriter, BatchedJournal
from components.frontend.http.callers import Caller
from dynamo_local.core.answers.records import AnswerHead, Record, begun, event, records_in
from dynamo_local.core.answers.requests import first_events
from dynamo_local.core.errors import DecodeError, StateError
from dynamo_local.core.http.asgi import App
from dynamo_local.log_once import LogOnce
from dynamo_local.tasks import TaskGuard, finish_in_thread, take_in_thread
from state.answers.folder import AnswerFolder
from state.answers.journal import AnswerJournal

_log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
"""Between two looks for answers whose frontend has died, and for those that are to be cancelled."""

REMOVE_EVERY_S = 60.0
"""Between two looks for answers that have expired."""


class Answers:
    """Computes answers. `why_closed`: why none are kept; empty: they are, as far as is known. `wall_clock`: when they
    were created and expire."""

    def __init__(
        self,
        folder: AnswerFolder,
        limits: AnswerLimits,
        tasks: TaskGuard,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.folder = folder
        self.limits = limits
        self.wall_clock = wall_clock
        self.why_closed = "the frontend is starting"
        self.is_closing = False
        self._tasks = tasks
        self._writer = AnswerWriter()
        self._computing: dict[str, tuple[RunningAnswer, asyncio.Task[None]]] = {}
        self._pass_on: App | None = None
        self._caller: Callable[[str], Caller | None] = lambda _: None
        self._remove_at = 0.0

    def connect(self, pass_on: App, caller: Callable[[str], Caller | None]) -> None:
        """Have requests answered by `pass_on`, as if the caller that their scope names had sent them. `caller` returns
        who owns what is kept under a name."""
        self._pass_on, self._caller = pass_on, caller

    async def start(self) -> None:
        """Begin to compute. Never raises: without a folder, no answers are kept."""
        try:
            await asyncio.to_thread(self.folder.check)
        except StateError as error:
            self.why_closed = str(error)
            _log.error("no answers are kept: %s", error)
            return
        self.why_closed = ""
        self._tasks.spawn("journals of answers", self._writer.run())
        self._tasks.spawn("answers", self._look_after())

    async def close(self) -> None:
        """Leave all answers to other frontends, or to the next one."""
        self.is_closing = True
        tasks = [task for _, task in self._computing.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def begin(self, owner: str, head: AnswerHead) -> RunningAnswer:
        """Begin an answer. Raises DiskError if it cannot be kept."""
        data = begun(head) + b"".join(map(event, first_events(head)))
        journal = await finish_in_thread(lambda: self.folder.create(owner, head.answer, data))
        return self._compute(KeptLog(records_in(data), BatchedJournal(journal, self._writer)))

    def running(self, answer: str) -> RunningAnswer | None:
        """Return an answer that this frontend computes."""
        found = self._computing.get(answer)
        return None if found is None else found[0]

    def waiting(self) -> Mapping[str, int]:
        """Return how many answers wait until they are tried again, by the name by which they ask for a model."""
        waiting = (running for running, _ in self._computing.values() if running.is_waiting)
        return Counter(str(running.head.fields.get("model", "")) for running in waiting)

    async def ended(self, answer: str) -> None:
        """Wait until this frontend does not compute the answer any more."""
        if (found := self._computing.get(answer)) is not None:
            await asyncio.wait({found[1]})

    def _compute(self, log: KeptLog) -> RunningAnswer:
        assert self._pass_on is not None, "answers are not connected"
        owner = log.journal.journal.owner
        running = RunningAnswer(log, self._pass_on, lambda: self._caller(owner), self.limits.answer_patience_s)
        task = self._tasks.spawn(f"answer {log.head.answer}", self._run(running))
        self._computing[log.head.answer] = running, task
        return running

    async def _run(self, running: RunningAnswer) -> None:
        journal = running.journal
        try:
            await running.run()
            if journal.failure is not None:
                _log.error("answer %s fails: %s", running.head.answer, journal.failure)
            await finish_in_thread(journal.journal.end)
        except StateError as error:
            _log.error("answer %s: %s", running.head.answer, error)
            journal.journal.close()
        except Exception:  # noqa: BLE001
            # The boundary of an answer: what is wrong with one must not end the process, and so all others.
            _log.exception("answer %s ends", running.head.answer)
            await finish_in_thread(journal.journal.end)
        except asyncio.CancelledError:
            # It goes on elsewhere: what was accepted is written before others may take it.
            await self._writer.write()
            journal.journal.close()
            raise
        finally:
            del self._computing[running.head.answer]

    async def _look_after(self) -> None:
        log_once = LogOnce(_log)
        while True:
            try:
                await self._look()
                log_once.clear()
            except StateError as error:
                log_once.warn(f"answers cannot be looked after: {error}")
            await asyncio.sleep(LOOK_EVERY_S)

    async def _look(self) -> None:
        left, cancelled = await finish_in_thread(self.folder.look)
        for owner, answer in left:
            if answer not in self._computing and not self.is_closing:
                await self._take_over(owner, answer)
            if answer in cancelled and (running := self.running(answer)) is not None:
                running.cancel()
        if time.monotonic() >= self._remove_at:
            self._remove_at = time.monotonic() + REMOVE_EVERY_S
            kept_s = self.limits.answer_retention_s
            await finish_in_thread(lambda: self.folder.remove_expired(self.wall_clock(), kept_s))

    async def _take_over(self, owner: str, answer: str) -> None:
        """Go on with an answer, if nobody computes it."""
        taken = await take_in_thread(lambda: self._take(owner, answer), lambda each: each[0].close())
        if taken is not None and (log := await self._log_of(*taken)) is not None:
            running = self._compute(log)
            _log.info("answer %s goes on at token %d", answer, running.tokens)

    def _take(self, owner: str, answer: str) -> tuple[AnswerJournal, list[Record]] | None:
        journal = self.folder.take(owner, answer)
        if journal is None:
            return None
        try:
            return journal, journal.read()
        except StateError:
            journal.close()
            raise

    async def _log_of(self, journal: AnswerJournal, records: list[Record]) -> KeptLog | None:
        try:
            return KeptLog(records, BatchedJournal(journal, self._writer))
        except DecodeError as error:
            _log.error("answer %s cannot go on: %s", journal.answer, error)
            await finish_in_thread(journal.end)
        return None
