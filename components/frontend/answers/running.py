"""One answer that this frontend computes: vLLM's application is asked until it has answered in full."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from components.frontend.answers.kept_log import FIRST_EVENTS, KeptLog
from components.frontend.answers.recording import Recording, recorded
from components.frontend.answers.sink import AnswerSink
from components.frontend.answers.writing import MAX_JOURNAL_BYTES, BatchedJournal
from components.frontend.http.body import replayed
from components.frontend.http.callers import Caller
from components.frontend.http.own_requests import nothing_more, own_scope
from components.frontend.http.usage import note_attempts
from dynamo_local.core.answers.continuing import Continuation, DifferentAnswerError
from dynamo_local.core.answers.records import AnswerHead
from dynamo_local.core.answers.requests import as_kept, inner_body
from dynamo_local.core.answers.status import CANCELLED, QUEUED, OutOfOrderError, ended
from dynamo_local.core.errors import one_line
from dynamo_local.core.http.asgi import App
from dynamo_local.core.usage.records import LEFT
from dynamo_local.core.usage.tally import Counted

PassOn = App
"""Has a request answered as if it had come by HTTP, by the caller that its scope names."""

PATH = "/v1/responses"

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_UNKNOWN_MODEL_S = 120.0
"""Time for which the model of an answer may be unknown: after a restart, endpoints come one by one."""

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
        pause_s, since, tokens = _FIRST_PAUSE_S, time.monotonic(), self.tokens
        while not self.has_ended:
            self._waited_s = time.monotonic() - since
            why = await self._attempt()
            if self.tokens > tokens:
                pause_s, since, tokens = _FIRST_PAUSE_S, time.monotonic(), self.tokens
            self._end_early(why)
            if not self.has_ended:
                await self._pause(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
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
        scope = own_scope(PATH, caller, self.head.headers)
        note_attempts(scope, self)
        with recorded(recording):
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
        if status == 404 and self._log.state.status == QUEUED and self._waited_s < _UNKNOWN_MODEL_S:
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
