"""Reads the streamed answer to a chat request."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from dynamo_local.load.client import refusal
from dynamo_local.load.connection import Events, ExchangeError

_REFUSED = 400


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    """The same under vLLM's former name."""


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: tuple[_Choice, ...] = ()
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


_decoder = msgspec.json.Decoder(_Chunk)


@dataclass(frozen=True)
class Part:
    """A part of an answer, in the order of arrival. `is_reasoning`: the model's thoughts before the answer."""

    text: str
    is_reasoning: bool = False


@dataclass
class AnswerReader:
    """Reads an answer and keeps its figures. Times are those of `time.monotonic`."""

    began_s: float
    first_s: float | None = None
    last_s: float | None = None
    prompt_tokens: int | None = None
    tokens: int | None = None
    finish_reason: str | None = None
    _events: Events = field(default_factory=Events)

    def take(self, data: bytes, now: float) -> list[Part]:
        """Read a part of the body. Raises ExchangeError for an error in the stream, and for an invalid stream."""
        parts: list[Part] = []
        for event in self._events.feed(data):
            if event != b"[DONE]":
                parts += self._parts(event)
        if parts:
            self.first_s = self.first_s if self.first_s is not None else now
            self.last_s = now
        return parts

    def end(self) -> None:
        """Finish at the end of the body. Raises ExchangeError if the answer is not complete."""
        if self.finish_reason is None:
            raise ExchangeError("broken off", "the answer broke off")

    def _parts(self, event: bytes) -> list[Part]:
        try:
            chunk = _decoder.decode(event)
        except msgspec.DecodeError as error:
            raise ExchangeError("bad answer", f"the server does not answer as OpenAI's API does: {error}") from error
        if bytes(chunk.error) not in (b"", b"null"):
            raise refusal(_REFUSED, event)
        if chunk.usage is not None:
            self.prompt_tokens, self.tokens = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
        parts: list[Part] = []
        for choice in chunk.choices[:1]:
            self.finish_reason = choice.finish_reason or self.finish_reason
            if thought := choice.delta.reasoning or choice.delta.reasoning_content:
                parts.append(Part(thought, is_reasoning=True))
            if choice.delta.content:
                parts.append(Part(choice.delta.content))
        return parts

    def figures(self) -> str:
        """The figures of the answer, in a line."""
        if self.first_s is None or self.last_s is None:
            return "no tokens"
        first_s, whole_s, decode_s = self.first_s - self.began_s, self.last_s - self.began_s, self.last_s - self.first_s
        tokens = "tokens not counted by the server" if self.tokens is None else f"{self.tokens} tokens"
        prompt = "" if self.prompt_tokens is None else f"{self.prompt_tokens} prompt tokens, "
        # The first token's time is that of the prompt, so it is left out of the rate.
        rate = f", {(self.tokens - 1) / decode_s:.1f} tokens/s" if self.tokens and self.tokens > 1 and decode_s else ""
        return f"{prompt}{tokens} in {whole_s:.2f} s, first after {first_s:.2f} s{rate}"
