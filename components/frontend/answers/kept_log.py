"""What a frontend knows of an answer that is kept: its log, the writing of its journal, and the recording of output.

Each part of the log is noted in the journal, which is written in batches, in a thread: each is shown when it is on the
disk."""

from __future__ import annotations

import asyncio
import hashlib
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from dynamo_local.core.answers.events import AnswerState, OutOfOrderError, numbered
from dynamo_local.core.answers.records import (
    MAX_PROMPT_TOKENS,
    AnswerHead,
    KeptPrompt,
    Kind,
    Record,
    counted,
    counted_in,
    event,
    event_in,
    head_in,
    prompt,
    prompt_in,
    record,
    tokens,
    tokens_in,
)
from dynamo_local.core.errors import DecodeError, StateError
from dynamo_local.core.messages.work import TokenDelta
from dynamo_local.core.names import FIRST_OF_MAIN
from dynamo_local.core.ports import Request
from dynamo_local.core.request.recovery import Fidelity
from dynamo_local.core.usage.records import Counted
from dynamo_local.tasks import finish_in_thread
from state.answers.journal import AnswerJournal

FIRST_EVENTS = 2
"""Number of events before those that are made of vLLM's."""


class KeptLog:
    """What is known of an answer that this frontend computes: its `prompt`, the `tokens` that were accepted, the
    `events` that were made of them, and what of it is `counted` as used."""

    def __init__(self, records: Sequence[Record], journal: BatchedJournal) -> None:
        """`records`: of the journal as it is. Raises DecodeError."""
        if not records or records[0].kind is not Kind.BEGUN:
            raise DecodeError("the journal of an answer does not begin with its request")
        self.head: AnswerHead = head_in(records[0].content)
        self.journal = journal
        self.state = AnswerState()
        self.prompt: KeptPrompt | None = None
        self.tokens: list[TokenDelta] = []
        self.events: list[dict[str, Any]] = []
        self.counted = Counted()
        for one in records[1:]:
            self._read(one)

    def note_prompt(self, content: KeptPrompt) -> None:
        """Note which prompt the tokens continue."""
        self.prompt = content
        self.journal.add(prompt(content))

    def note_counted(self, content: Counted) -> None:
        """Note what was counted so far."""
        self.counted = content
        self.journal.add(counted(content))

    def note_tokens(self, delta: TokenDelta) -> None:
        """Note tokens that the request's log has accepted."""
        noted = tokens(delta)
        # A copy: vLLM appends to the lists of tokens that it gets.
        self.tokens.append(tokens_in(noted))
        self.journal.add(record(Kind.TOKENS, noted))

    def note_event(self, content: dict[str, Any]) -> None:
        """Note the next event. Raises OutOfOrderError."""
        content = numbered(content, self.state.events)
        self.state.take(content)
        self.events.append(content)
        self.journal.add(event(content))

    def _read(self, one: Record) -> None:
        if one.kind is Kind.PROMPT:
            self.prompt = prompt_in(one.content)
        elif one.kind is Kind.COUNTED:
            self.counted = counted_in(one.content)
        elif one.kind is Kind.TOKENS:
            self.tokens.append(tokens_in(one.content))
        elif one.kind is Kind.EVENT:
            self.events.append(content := event_in(one.content))
            try:
                self.state.take(content)
            except OutOfOrderError as error:
                raise DecodeError(f"the journal of an answer is out of order: {error}") from error


# Journals of all answers, written in batches.

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


# What a request has output, noted in the journal of its answer before vLLM's application gets it.


class Recording:
    """The tokens of one request; `before`: those of earlier attempts. `failure`: why the request has failed."""

    def __init__(self, log: KeptLog) -> None:
        self._log = log
        self._has_begun = False
        self._vocabulary = ""
        self.before: Sequence[TokenDelta] = tuple(log.tokens)
        self.failure: TokenDelta | None = None

    def prompt(self, rendered: Sequence[int], vocabulary: str) -> Sequence[int]:
        """Return the prompt that the answer was begun with, whatever is rendered now: a chat template may print the
        time. `vocabulary`: a digest of the tokenizer's, in which alone the tokens mean the same."""
        self._vocabulary = vocabulary
        kept = self._log.prompt
        return rendered if kept is None or kept.token_ids is None else kept.token_ids

    def begin(self, request: Request, revision: str) -> str | None:
        """Begin with the request that the application has made. Returns why it cannot be continued, if so.

        `revision`: of the endpoint that serves it.
        """
        why = self._begin(request, revision)
        if why is not None:
            self.failure = TokenDelta(request.request_id, 0, 0, [], finish="error", error=why, fault="request")
        return why

    def _begin(self, request: Request, revision: str) -> str | None:
        if self._has_begun:
            return "an answer that is kept cannot call tools of the server"
        self._has_begun = True
        digest = self._digest(request, revision)
        if self._log.prompt is None:
            token_ids = list(request.prompt_token_ids)
            self._log.note_prompt(KeptPrompt(digest, token_ids if len(token_ids) <= MAX_PROMPT_TOKENS else None))
        elif self._log.prompt.digest != digest:
            changed = "its model" if self._log.prompt.token_ids is not None else "its model or its chat template"
            return f"the answer cannot go on: {changed} has changed since it was begun"
        if self.before and request.survival.fidelity is Fidelity.NONE:
            lost = request.survival.because_of or "its sampling"
            return f"the answer cannot go on after a restart: the state of {lost} is lost"
        return None

    def take(self, delta: TokenDelta) -> None:
        """Take tokens that the request's log has accepted, or its failure."""
        if delta.finish == "error":
            self.failure = delta
        else:
            self._log.note_tokens(delta)

    def _digest(self, request: Request, revision: str) -> str:
        content = hashlib.sha256(array("q", request.prompt_token_ids).tobytes())
        # As before a graph's own model had a revision: what was begun then goes on.
        named = "" if revision == FIRST_OF_MAIN else revision
        content.update(f"{named}\n{request.adapter or ''}\n{self._vocabulary}".encode())
        return content.hexdigest()
