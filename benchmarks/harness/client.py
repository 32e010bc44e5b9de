"""A client of an OpenAI API that notes when each token of an answer came: asyncio alone, so that it costs little beside
the server that it measures."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import msgspec

HOST = "127.0.0.1"
_TIMEOUT_S = 120.0
_IDLE_S = 2.0
"""Time after which an unused connection is not used again: servers close theirs after 5 s or more."""
_SHOWN_CHARS = 200

_Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class ServerError(Exception):
    """A server did not do what it was started for."""

    exit_code = 1


class ExchangeError(ServerError):
    """A request got no complete answer."""


@dataclass
class Completion:
    """A streamed completion. Times are those of `time.monotonic`."""

    sent_s: float | None = None
    chunks_s: list[float] = field(default_factory=list)
    """When each event with tokens came. One may have several tokens."""
    ended_s: float | None = None
    """When the answer was complete, or failed."""
    tokens: int = 0
    """By the server's count, or else the number of events."""
    token_ids: list[int] = field(default_factory=list)
    """If the server returns them (`return_token_ids`)."""
    request_id: str = ""
    failure: str = ""
    """Why there is no complete answer; empty if there is one, or the answer is still coming."""

    @property
    def is_completed(self) -> bool:
        return self.ended_s is not None and not self.failure

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token."""
        return self.chunks_s[0] - self.sent_s if self.chunks_s and self.sent_s is not None else None

    @property
    def e2e_s(self) -> float | None:
        """Time to the end of the answer."""
        return None if self.ended_s is None or self.sent_s is None else self.ended_s - self.sent_s

    @property
    def itl_s(self) -> float | None:
        """Mean time from token to token of this answer; None with fewer than two tokens."""
        if self.tokens < 2 or not self.chunks_s:
            return None
        return (self.chunks_s[-1] - self.chunks_s[0]) / (self.tokens - 1)


class Client:
    """Asks one model for completions, over connections that are used again, one request at a time on each. An async
    context manager. `fields`: more of each request."""

    def __init__(self, port: int, model: str, **fields: Any) -> None:
        self._port = port
        self._fields = {
            "model": model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            "ignore_eos": True,
            **fields,
        }
        self._idle: list[tuple[float, _Connection]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._idle:
            self._idle.pop()[1][1].close()

    async def complete(
        self, prompt: str | Sequence[int], tokens: int, completion: Completion | None = None
    ) -> Completion:
        """Request a completion of a prompt (text, or token ids), and wait for its end. A failure is noted in the
        completion and not raised; a cancellation is noted and raised. Pass a `completion` to watch it while it
        arrives."""
        completion = completion or Completion()
        body = msgspec.json.encode({**self._fields, "prompt": prompt, "max_tokens": tokens})
        reading = _Reading(completion)
        completion.sent_s = time.monotonic()
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                connection = await self._connection()
                if await exchange(connection, _request("POST", "/v1/completions", body), reading.take):
                    self._idle.append((time.monotonic(), connection))
            reading.end()
        except ExchangeError as error:
            completion.failure = str(error)
        except TimeoutError:
            completion.failure = f"no end within {_TIMEOUT_S:g} s"
        except asyncio.CancelledError:
            completion.failure = "cut off"
            raise
        finally:
            completion.ended_s = time.monotonic()
            completion.tokens = completion.tokens or len(completion.chunks_s)
        return completion

    async def _connection(self) -> _Connection:
        while self._idle:
            since, connection = self._idle.pop()
            if time.monotonic() - since < _IDLE_S and not connection[0].at_eof():
                return connection
            connection[1].close()
        return await _connect(self._port)


async def ask(port: int, method: str, path: str, fields: Any = None) -> bytes:
    """The body of an answer with status 200, on a connection of its own. `fields`: sent as JSON. Raises
    ExchangeError."""
    parts: list[bytes] = []
    request = _request(method, path, b"" if fields is None else msgspec.json.encode(fields))
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            connection = await _connect(port)
            await exchange(connection, request, parts.append)
    except TimeoutError as error:
        raise ExchangeError(f"no answer within {_TIMEOUT_S:g} s") from error
    connection[1].close()
    return b"".join(parts)


async def exchange(connection: _Connection, request: bytes, take: Callable[[bytes], None]) -> bool:
    """Send a request, and have `take` called for each part of the answer's body. Returns whether the connection can be
    used again. Raises ExchangeError for a connection that breaks, and another status than 200."""
    reader, writer = connection
    try:
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        status, refused = head.split()[1], list[bytes]()
        keeps = await _read_body(reader, head, take if status == "200" else refused.append)
        if status != "200":
            raise ExchangeError(f"HTTP {status}: {_shown(b''.join(refused))}")
    except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
        writer.transport.abort()
        raise ExchangeError(f"broken off: {error}") from error
    except BaseException:
        writer.transport.abort()
        raise
    return keeps and "connection: close" not in head


async def _read_body(reader: asyncio.StreamReader, head: str, take: Callable[[bytes], None]) -> bool:
    """Read a body whose end the head tells; returns False for one that ends with its connection."""
    if "transfer-encoding: chunked" in head:
        while size := int(await reader.readuntil(b"\r\n"), 16):
            take((await reader.readexactly(size + 2))[:-2])
        await reader.readuntil(b"\r\n")
    elif length := re.search(r"content-length: *(\d+)", head):
        take(await reader.readexactly(int(length[1])))
    else:
        take(await reader.read())
        return False
    return True


async def _connect(port: int) -> _Connection:
    try:
        return await asyncio.open_connection(HOST, port)
    except OSError as error:
        raise ExchangeError(f"cannot connect: {error}") from error


def _request(method: str, path: str, body: bytes) -> bytes:
    sent = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body else ""
    return f"{method} {path} HTTP/1.1\r\nHost: {HOST}\r\n{sent}\r\n".encode() + body


class _Reading:
    """Server-sent events of one completion, noted in it as they come."""

    def __init__(self, completion: Completion) -> None:
        self._completion = completion
        self._rest = b""
        self._finished = False
        self._empty_end_s: float | None = None

    def take(self, part: bytes) -> None:
        """Read a part of the body. Raises ExchangeError for an error in the stream."""
        now = time.monotonic()
        *events, self._rest = (self._rest + part).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: {"):
                self._note(msgspec.json.decode(event[6:]), now)

    def _note(self, chunk: dict[str, Any], now: float) -> None:
        completion = self._completion
        if "choices" not in chunk:
            raise ExchangeError(f"error in the stream: {_shown(msgspec.json.encode(chunk))}")
        completion.request_id = chunk["id"]
        if usage := chunk.get("usage"):
            completion.tokens = usage["completion_tokens"]
        for choice in chunk["choices"]:
            ids, finished = choice.get("token_ids"), choice.get("finish_reason") is not None
            # The text of a token may be empty, where a character has several tokens.
            if (choice["text"] or not finished) if ids is None else ids:
                completion.chunks_s.append(now)
                completion.token_ids += ids or ()
            elif ids is None:
                self._empty_end_s = now
            self._finished |= finished

    def end(self) -> None:
        """Finish at the end of the body. Raises ExchangeError if the answer is not complete."""
        completion = self._completion
        if not self._finished:
            raise ExchangeError("the stream ended without an end of the answer")
        if self._empty_end_s is not None and len(completion.chunks_s) < completion.tokens:
            completion.chunks_s.append(self._empty_end_s)  # it brought a token, though no text


def _shown(text: bytes) -> str:
    return " ".join(text.decode(errors="replace").split())[:_SHOWN_CHARS]
