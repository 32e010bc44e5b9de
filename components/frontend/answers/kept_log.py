"""The log of an answer: what is known of it, each part of which is noted in its journal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from components.frontend.answers.writing import BatchedJournal
from dynamo_local.core.answers.records import (
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
from dynamo_local.core.answers.status import AnswerState, OutOfOrderError, numbered
from dynamo_local.core.errors import DecodeError
from dynamo_local.core.messages.tokens import TokenDelta
from dynamo_local.core.usage.tally import Counted

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
