"""Meters requests: what each uses is counted in a tally, and written down before its client has the whole answer.

Whoever handles a request finds its tally by `tally_of(scope)`. Tokens are added as engines generate them. When the call
of `Metered` is over, the tally is complete, whatever became of the request: answered, failed, or left by its client.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from types import TracebackType
from typing import Protocol

import msgspec

from components.frontend.http.models import ModelEntry
from components.frontend.request_context import request_of
from dynamo_local.core.http.asgi import Event, Scope, Send
from dynamo_local.core.usage.records import LEFT, Counted, Tally, UsageRecord
from dynamo_local.monitor.metrics import USAGE_LOST, USAGE_PENDING, Sample, UsageCounts
from state.paths import StatePaths
from state.usage.journal import UsageJournal

_log = logging.getLogger(__name__)


Write = Callable[[UsageRecord], None]
"""Takes a record, at once. Never raises."""


class Attempts(Protocol):
    """A request that may be made in several attempts, each of which makes again what those before it had."""

    @property
    def counted(self) -> Counted:
        """What was counted so far."""

    def note_counted(self, content: Counted) -> None:
        """Note what is counted now."""

    def goes_on(self, status: int) -> bool:
        """Whether another attempt follows one that ends with this status."""


class _Single:
    """A request that is made once."""

    def __init__(self) -> None:
        self.counted = Counted()

    def note_counted(self, content: Counted) -> None:
        self.counted = content

    def goes_on(self, status: int) -> bool:
        return False


class UsageMeter:
    """Meters the requests of one frontend. `write` takes a record of each."""

    def __init__(
        self,
        write: Write = lambda _: None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.write = write
        self.clock = clock
        self.wall_clock = wall_clock

    def of(self, scope: Scope, entry: ModelEntry, asked: str | None, *, as_told: bool = False) -> Metered:
        """Meter what is called within its context. `asked`: the model that the request names. `as_told`: count what the
        answer tells, since engines compute more than that."""
        return Metered(self, scope, entry.name_of(asked), as_told=as_told)


class Metered:
    """A request that is metered, in a context whose end writes what is not written yet."""

    def __init__(self, meter: UsageMeter, scope: Scope, endpoint: str, *, as_told: bool) -> None:
        context = request_of(scope)
        self.tally = context.tally = Tally()
        self._context = context
        self._meter = meter
        self._path: str = scope["path"]
        self._endpoint = endpoint
        self._as_told = as_told
        self._began = meter.clock()
        self._status = LEFT
        self._is_answered = False
        self._has_written = False
        self._attempts: Attempts = context.attempts or _Single()

    def __enter__(self) -> Metered:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_answered:
            self._status = LEFT
        self._write()

    def sending(self, send: Send) -> Send:
        """Return an ASGI `send` that writes the request's record before the client has the rest of the answer."""

        def send_on(event: Event) -> Awaitable[None]:
            if event["type"] == "http.response.start":
                self._status = event["status"]
            else:
                self._look(event)
            return send(event)

        return send_on

    def refused(self, status: int) -> None:
        """Note that the request is refused after all, with this status."""
        self._status, self._is_answered = status, True

    def _look(self, event: Event) -> None:
        """Write before the last part of an answer is sent, and before any part behind the last token: a stream tells
        what was used before it ends."""
        last = not event.get("more_body", False)
        if last and self._as_told:
            self._take_told(event.get("body", b""))
        self._is_answered = self._is_answered or last
        if last or (self.tally.running <= 0 and self.tally.prompt):
            self._write()

    def _write(self) -> None:
        tally, before, meter = self.tally, self._attempts.counted, self._meter
        now = Counted(
            # A request counts once, however many attempts it takes; and one that is to go on has not failed.
            1 if not self._attempts.goes_on(self._status) else before.requests,
            max(tally.prompt, before.prompt),
            max(tally.cached, before.cached),
            max(tally.output, before.output),
        )
        if now == before or self._is_over_a_limit:
            return
        first, self._has_written = not self._has_written, True
        meter.write(
            UsageRecord(
                time=round(meter.wall_clock(), 3),
                endpoint=self._endpoint,
                key=self._context.caller.name,
                path=self._path,
                status=self._status,
                prompt=now.prompt - before.prompt,
                cached=now.cached - before.cached,
                output=now.output - before.output,
                seconds=round(meter.clock() - self._began, 6) if first else 0.0,
                requests=now.requests - before.requests,
            )
        )
        self._attempts.note_counted(now)

    @property
    def _is_over_a_limit(self) -> bool:
        """Whether no model was asked, because a limit of the key has refused what was to be submitted."""
        if self.tally.total:
            return False
        ticket = self._context.ticket
        return ticket is not None and ticket.refusal is not None

    def _take_told(self, body: bytes) -> None:
        try:
            told = _told.decode(body).usage
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return
        if told is not None:
            self.tally.replace(told.prompt_tokens, told.completion_tokens)


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


_told = msgspec.json.Decoder(_Answer)


# Records go to the journal of the frontend, and into its metrics.

_FLUSH_EVERY_S = 1.0


class FrontendUsage:
    """What the requests of one frontend use."""

    def __init__(self, paths: StatePaths, lease: str) -> None:
        self._journal = UsageJournal(paths, lease, lambda why: _log.error("%s", why))
        self._counts = UsageCounts()
        self.meter = UsageMeter(self._note)

    def _note(self, record: UsageRecord) -> None:
        self._counts.note(record)
        self._journal.write(record)

    async def run(self) -> None:
        """Write records that could not be written before, until cancelled."""
        while True:
            await asyncio.sleep(_FLUSH_EVERY_S)
            if self._journal.pending:
                self._journal.flush()

    def close(self) -> None:
        """End the journal: the last request has been answered."""
        lost = self._journal.lost
        self._journal.close()
        if self._journal.lost > lost:
            _log.error("the usage of %d requests could not be written, and is lost", self._journal.lost - lost)

    def samples_by_key(self) -> Iterator[Sample]:
        """Return of the samples those that administrators are shown by key."""
        return self._counts.samples(by_key=True)

    def samples(self) -> Iterator[Sample]:
        """Return the samples for /metrics, without the names of keys."""
        yield from self._counts.samples(by_key=False)
        yield Sample(USAGE_PENDING, (), self._journal.pending)
        yield Sample(USAGE_LOST, (), self._journal.lost)
