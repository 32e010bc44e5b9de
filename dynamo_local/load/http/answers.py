"""Reads streamed completions and error answers of an OpenAI API."""

from __future__ import annotations

from typing import Any

import msgspec

from dynamo_local.load.errors import ExchangeError
from dynamo_local.load.http.body import Events
from dynamo_local.load.results.records import Completion, Record

_DETAIL_CHARS = 200


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: str | None = None
    token_ids: list[int] | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def has_tokens(self) -> bool:
        """Whether the choice has tokens. The text of a token may be empty, where a character has several tokens. The
        first chunk of a chat (role) and the last one (finish reason) have none."""
        if self.token_ids is not None:
            return bool(self.token_ids)
        if self.delta is None:
            return bool(self.text) or self.finish_reason is None
        delta = self.delta
        return bool(delta.content or delta.reasoning or delta.reasoning_content or delta.tool_calls)


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: tuple[_Choice, ...] = ()
    usage: _Usage | None = None
    error: Any = None
    object: str | None = None
    message: str | None = None


_decoder = msgspec.json.Decoder(_Chunk)


class AnswerReader:
    """Reads the body of an answer in parts, and fills its record. `now` has the same origin as the record's times."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._token_ids = record.token_ids if isinstance(record, Completion) else None
        self._events = Events()
        self._usage: _Usage | None = None
        self._empty_end_s: float | None = None
        self._finished = False

    def take(self, data: bytes, now: float) -> None:
        """Read a part of the body. Raises ExchangeError for an error in the stream, and for an invalid stream."""
        for event in self._events.feed(data):
            if event == b"[DONE]":
                self._finished = True
                continue
            try:
                chunk = _decoder.decode(event)
            except msgspec.DecodeError as error:
                raise ExchangeError("bad answer", f"an event is not a completion: {error}") from error
            if chunk.error is not None or chunk.object == "error":
                raise ExchangeError("error in the stream", _shortened(_message(chunk.error or chunk.message)))
            self._note(chunk, now)

    def _note(self, chunk: _Chunk, now: float) -> None:
        self._usage = chunk.usage or self._usage
        for choice in chunk.choices[:1]:
            if choice.has_tokens:
                self._record.chunks_s.append(now)
                if self._token_ids is not None and choice.token_ids is not None:
                    self._token_ids += choice.token_ids
            elif choice.finish_reason is not None and choice.delta is None and choice.token_ids is None:
                self._empty_end_s = now
            self._finished = self._finished or choice.finish_reason is not None

    def end(self) -> None:
        """Finish at the end of the body. Raises ExchangeError if the answer is not complete."""
        record = self._record
        if not self._finished:
            raise ExchangeError("broken off", "the stream ended without an end of the answer")
        if self._usage is not None:
            record.prompt_tokens, record.tokens = self._usage.prompt_tokens, self._usage.completion_tokens
            if self._empty_end_s is not None and len(record.chunks_s) < record.tokens:
                record.chunks_s.append(self._empty_end_s)  # it brought a token, though no text
        record.tokens = record.tokens or len(record.chunks_s)
        if not record.chunks_s:
            raise ExchangeError("no tokens", "the answer has no tokens")


def refusal(status: int, body: bytes) -> ExchangeError:
    """Return the error for an answer with another status than 200."""
    try:
        said = _message(msgspec.json.decode(body))
    except msgspec.DecodeError:
        said = body.decode(errors="replace")
    return ExchangeError(f"HTTP {status}", _shortened(said))


def _message(said: Any) -> str:
    """Return the message in an error of OpenAI's shape, or of another one."""
    while isinstance(said, dict):
        said = next((said[key] for key in ("error", "message", "detail") if said.get(key)), None) or str(said)
    return str(said)


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _DETAIL_CHARS else f"{line[: _DETAIL_CHARS - 1]}…"
