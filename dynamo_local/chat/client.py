"""Sends chat requests to one model, and reads the streamed answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from dynamo_local.core.conversation import Conversation
from dynamo_local.core.errors import DynamoError
from dynamo_local.load.client import Endpoint, refusal
from dynamo_local.load.connection import Events, ExchangeError

# Reads the streamed answer to a chat request.

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


_PATH = "/v1/chat/completions"
_SILENCE_S = 600.0
"""A server that says nothing for so long counts as gone. A long prompt on a CPU takes minutes."""


class ChatError(DynamoError):
    """The model gives no answer."""


@dataclass(frozen=True)
class Sampling:
    """Fields of the requests; None leaves the choice to the server."""

    max_tokens: int | None = None
    temperature: float | None = None

    def fields(self) -> dict[str, Any]:
        given = {"max_tokens": self.max_tokens, "temperature": self.temperature}
        return {name: value for name, value in given.items() if value is not None}


class ChatClient:
    """Asks one model, one request at a time. Connections are kept between requests; `close` it in the end."""

    def __init__(self, endpoint: Endpoint, model: str, sampling: Sampling) -> None:
        self.model = model
        self._endpoint, self._sampling = endpoint, sampling
        self._connections = endpoint.connections()

    def close(self) -> None:
        self._connections.close()

    async def stream(self, conversation: Conversation, reader: AnswerReader) -> AsyncIterator[Part]:
        """Yield the answer in parts as they arrive, and fill the reader. Raises ChatError."""
        parts: asyncio.Queue[Part | None] = asyncio.Queue()

        def take(data: bytes, now: float) -> None:
            for part in reader.take(data, now):
                parts.put_nowait(part)

        fields = {"stream": True, "stream_options": {"include_usage": True}}
        exchange = asyncio.create_task(self._connections.exchange(self._request(conversation, fields), take))
        exchange.add_done_callback(lambda _: parts.put_nowait(None))
        try:
            while (part := await _within(_SILENCE_S, parts)) is not None:
                yield part
            answer = await exchange
            if answer.status != 200:
                raise refusal(answer.status, answer.body)
            reader.end()
        except ExchangeError as error:
            raise _shown(error) from error
        except TimeoutError as error:
            raise ChatError(f"the server was silent for {_SILENCE_S:g} s", "see `dynamo ps`") from error
        finally:
            exchange.cancel()
            with suppress(asyncio.CancelledError, ExchangeError):
                await exchange

    async def whole(self, conversation: Conversation) -> bytes:
        """Return the whole answer, as the server's JSON. Raises ChatError."""
        data = bytearray()
        try:
            answer = await self._connections.exchange(
                self._request(conversation, {}), lambda part, now: data.extend(part)
            )
            if answer.status != 200:
                raise refusal(answer.status, answer.body)
        except ExchangeError as error:
            raise _shown(error) from error
        return bytes(data)

    def _request(self, conversation: Conversation, fields: dict[str, Any]) -> bytes:
        body = {"model": self.model, "messages": conversation.messages(), **self._sampling.fields(), **fields}
        return self._endpoint.request("POST", _PATH, msgspec.json.encode(body))


def reader() -> AnswerReader:
    """A reader for a request that is sent now."""
    return AnswerReader(time.monotonic())


def _shown(error: ExchangeError) -> ChatError:
    if error.kind in ("HTTP 401", "HTTP 403"):
        return ChatError(error.cause, "give the key with --api-key-file, DYN_API_KEY or OPENAI_API_KEY")
    return ChatError(error.cause, None if error.kind.startswith("HTTP") else "see `dynamo ps` and `dynamo logs`")


async def _within(seconds: float, parts: asyncio.Queue[Part | None]) -> Part | None:
    """Return the next part. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        return await parts.get()
