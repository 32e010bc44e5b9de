"""Sends chat requests to one model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from dynamo_local.chat.answer import AnswerReader, Part
from dynamo_local.core.conversation import Conversation
from dynamo_local.core.errors import DynamoError
from dynamo_local.load.client import Endpoint, refusal
from dynamo_local.load.connection import ExchangeError

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
