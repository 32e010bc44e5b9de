"""The answers that this frontend computes: begun for its clients, or taken over from frontends that have died.

vLLM's application is asked for each until it has answered in full."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from components.frontend.answers.kept_log import (
    FIRST_EVENTS,
    MAX_JOURNAL_BYTES,
    AnswerWriter,
    BatchedJournal,
    KeptLog,
    Recording,
)
from components.frontend.http.callers import Caller
from components.frontend.http.incoming import replayed
from components.frontend.http.own_requests import UNKNOWN_MODEL_S, backoff_s, nothing_more, own_scope
from components.frontend.request_context import RequestContext
from components.frontend.settings import AnswerLimits
from dynamo_local.core.answers.events import (
    CANCELLED,
    QUEUED,
    Continuation,
    DifferentAnswerError,
    OutOfOrderError,
    ended,
)
from dynamo_local.core.answers.records import AnswerHead, Record, begun, event, records_in
from dynamo_local.core.answers.requests import as_kept, first_events, inner_body
from dynamo_local.core.errors import DecodeError, StateError, one_line
from dynamo_local.core.http.asgi import App, Event, begins_event_stream
from dynamo_local.core.usage.records import LEFT, Counted
from dynamo_local.load.connection import Events
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


# One answer that this frontend computes.

PassOn = App
"""Has a request answered as if it had come by HTTP, by the caller that its scope names."""

PATH = "/v1/responses"

_MADE_HERE = "response.created"
"""The event of vLLM's that is made here, before the application is asked."""

AGAIN = frozenset({429, 503})
"""Statuses of refusals after which a request is tried again."""


class RunningAnswer:
    """An answer from its beginning, or from where another frontend has left it, to its end.

    `begun` is done when the application has accepted the request or, with its answer, when it has refused it.
    """

    def __init__(self, log: KeptLog, pass_on: PassOn, caller: Callable[[], Caller | None], patience_s: float) -> None:
        """`caller` returns whose request it is; None: nobody's any more. `patience_s`: how long it may take until there
        are more tokens."""
        self._log = log
        self._pass_on = pass_on
        self._caller = caller
        self._patience_s = patience_s
        self._waited_s = 0.0
        """From the last token before the current attempt to its beginning."""
        self.is_waiting = False
        """Whether it waits until it is tried again: it is no request in flight then."""
        self._is_cancelled = False
        self._broken: str | None = None
        self._interrupted = asyncio.Event()
        self.begun: asyncio.Future[AnswerSink | None] = asyncio.get_running_loop().create_future()
        log.journal.on_failure = self._interrupted.set

    @property
    def head(self) -> AnswerHead:
        return self._log.head

    @property
    def journal(self) -> BatchedJournal:
        return self._log.journal

    @property
    def counted(self) -> Counted:
        """What was counted of its use."""
        return self._log.counted

    def note_counted(self, content: Counted) -> None:
        """Note what is counted of its use."""
        self._log.note_counted(content)

    def goes_on(self, status: int) -> bool:
        """Whether another attempt follows one that ends with this status: it is to be tried again, or this frontend
        ends."""
        if status in AGAIN:
            return self._waited_s < self._patience_s
        return status == LEFT and not self._interrupted.is_set() and not self.has_ended

    @property
    def has_ended(self) -> bool:
        """Whether no event follows: the last one is known, or cannot be written."""
        return self._log.state.has_ended or self.journal.failure is not None

    @property
    def tokens(self) -> int:
        """Number of tokens that were accepted."""
        return sum(len(delta.token_ids) for delta in self._log.tokens)

    def cancel(self) -> None:
        """End the answer."""
        self._is_cancelled = True
        self._interrupted.set()

    async def run(self) -> None:
        """Compute the answer, until its end is on the disk, or never will be."""
        tries, since, tokens = 0, time.monotonic(), self.tokens
        while not self.has_ended:
            self._waited_s = time.monotonic() - since
            why = await self._attempt()
            if self.tokens > tokens:
                tries, since, tokens = 0, time.monotonic(), self.tokens
            self._end_early(why)
            if not self.has_ended:
                tries += 1
                await self._pause(backoff_s(tries))
        await self.journal.flushed()
        self._settle(None)

    def _end_early(self, why: str | None) -> None:
        """End the answer if it was cancelled, or fails for this reason."""
        state = self._log.state
        if self.has_ended:
            return
        if self._is_cancelled:
            self._log.note_event(state.changed(CANCELLED))
        elif (why := self._broken or why) is not None:
            self._log.note_event(state.failed(why))

    async def _pause(self, seconds: float) -> None:
        self.is_waiting = True
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._interrupted.wait()
        finally:
            self.is_waiting = False

    async def _attempt(self) -> str | None:
        """Ask the application. Returns why the answer fails; None: it has ended, or is to be tried again."""
        if self._is_cancelled:
            return None
        caller = self._caller()
        if caller is None:
            return "the key that asked for this answer was revoked, or has expired"
        recording, sink = Recording(self._log), AnswerSink(self._taker(), lambda: self._settle(None))
        call = asyncio.create_task(self._call(recording, caller, sink), name=f"answer {self.head.answer}")
        interrupted = asyncio.create_task(self._interrupted.wait(), name="end of an answer")
        try:
            await asyncio.wait({call, interrupted}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            interrupted.cancel()
            call.cancel()
            await asyncio.wait({call})
        cut = "" if call.cancelled() else _reason(call.exception())
        if sink.refusal is not None and not self._log.tokens:
            self._settle(sink)
        return self._why_failed(recording, sink, cut)

    async def _call(self, recording: Recording, caller: Caller, sink: AnswerSink) -> None:
        context = RequestContext(
            caller=caller, is_own=True, attempts=self, recording=recording, kept_prompt=recording.prompt
        )
        scope = own_scope(PATH, context, self.head.headers)
        await self._pass_on(scope, replayed(inner_body(self.head), nothing_more), sink)

    def _taker(self) -> Callable[[dict[str, Any]], None]:
        """Return what takes the events of one attempt."""
        continuation = Continuation(self._log.events[FIRST_EVENTS:])

        def take(made: dict[str, Any]) -> None:
            if made.get("type") == _MADE_HERE or self.has_ended or self._broken is not None:
                return
            try:
                for new in continuation.take(as_kept(ended(made), self.head)):
                    self._log.note_event(new)
            except (DifferentAnswerError, OutOfOrderError) as error:
                self._break_off(f"the answer cannot go on after a restart: {error}")
            if self.journal.is_full:
                self._break_off(f"the answer needs more than {MAX_JOURNAL_BYTES} bytes")

        return take

    def _break_off(self, why: str) -> None:
        self._broken = why
        self._interrupted.set()

    def _why_failed(self, recording: Recording, sink: AnswerSink, cut: str) -> str | None:
        """Return why the answer fails after an attempt; None: it has ended, or is to be tried again."""
        failure, refusal = recording.failure, sink.refusal
        if failure is not None:
            status, why = (500 if failure.fault else 503), failure.error or cut
        elif refusal is not None:
            status, why = refusal
        else:
            status, why = 503, cut or "it was cut off"
        if status == 404 and self._log.state.status == QUEUED and self._waited_s < UNKNOWN_MODEL_S:
            return None
        if status not in AGAIN:
            return why
        if self._waited_s >= self._patience_s:
            return f"{why}; no token has come for {self._patience_s:g} s (setting answer-patience-s)"
        return None

    def _settle(self, refused: AnswerSink | None) -> None:
        if not self.begun.done():
            self.begun.set_result(refused)


def _reason(error: BaseException | None) -> str:
    return "" if error is None else one_line(error)


# The answer of vLLM's application to a request whose answer is kept.

_events = msgspec.json.Decoder(dict[str, Any])


class AnswerSink:
    """Takes one answer. `status`: None until it begins. `error`: an error that came as an event.

    `take` gets each other event; what it raises ends the application's call.
    """

    def __init__(self, take: Callable[[dict[str, Any]], None], begun: Callable[[], None]) -> None:
        """`begun` is called when a stream of events has begun: the application has accepted the request."""
        self._take = take
        self._begun = begun
        self._events = Events()
        self._is_stream = False
        self.status: int | None = None
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = b""
        """Of an answer that is no stream of events."""
        self.error: dict[str, Any] | None = None

    async def __call__(self, event: Event) -> None:
        if event["type"] == "http.response.start":
            self.status, self.headers = event["status"], list(event["headers"])
            self._is_stream = event["status"] == 200 and begins_event_stream(event)
            if self._is_stream:
                self._begun()
        elif self._is_stream:
            for data in self._events.feed(event.get("body", b"")):
                self._take_event(_events.decode(data))
        else:
            self.body += event.get("body", b"")

    @property
    def refusal(self) -> tuple[int, str] | None:
        """Status and message of a refusal, or of an error event. None: there was neither."""
        error = self.error
        if error is not None:
            code = str(error.get("code", ""))
            return int(code) if code.isdigit() else 500, str(error.get("message"))
        if self.status is None or self._is_stream:
            return None
        return self.status, self._message()

    def _take_event(self, event: dict[str, Any]) -> None:
        if event.get("type") == "error":
            self.error = event
        elif isinstance(event.get("error"), dict):
            self.error = event["error"]
        else:
            self._take(event)

    def _message(self) -> str:
        try:
            return str(msgspec.json.decode(self.body)["error"]["message"])
        except (msgspec.MsgspecError, UnicodeError, KeyError, TypeError):
            return self.body.decode(errors="replace")[:200]
