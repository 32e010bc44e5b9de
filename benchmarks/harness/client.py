"""A client for streamed completions that costs little: it counts what arrives and decodes almost nothing."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, cast

_END_OF_HEAD = b"\r\n\r\n"
_END_OF_EVENT = b"\n\n"
_DONE = b"data: [DONE]"
_ERROR = b'data: {"error"'
_USAGE = b'"choices":[]'

READ_TIMEOUT_S = 120.0

_NOTHING: Mapping[str, Any] = {}


@dataclass
class Answer:
    """What became of one request. Times are those of `time.perf_counter`."""

    sent_at: float
    times: list[float] = field(default_factory=list)
    """Arrivals of the events with tokens."""
    tokens: int = 0
    """As the server counts them; 0 if it did not get that far."""
    ended_at: float = 0.0
    error: str = ""
    """Why it failed; empty if it did not."""
    request_id: str = ""
    events: list[bytes] = field(default_factory=list)
    """The events with tokens, if they are kept."""

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.times[0] - self.sent_at

    def tokens_between(self, begin: float, end: float) -> float:
        """Tokens that arrived then. A server may put several into one event: taken to be spread evenly."""
        if not self.times:
            return 0.0
        return self.tokens * sum(begin <= at < end for at in self.times) / len(self.times)

    def text(self) -> str:
        """The whole answer, of events that were kept."""
        return "".join(choice["text"] for choice in self._choices())

    def token_ids(self) -> list[int]:
        """Those of the events that were kept, if they were asked for (`return_token_ids`)."""
        return [token for choice in self._choices() for token in choice.get("token_ids") or ()]

    def _choices(self) -> Iterator[dict[str, Any]]:
        for event in self.events:
            yield from json.loads(event.removeprefix(b"data: "))["choices"]


class ChunkedBody:
    """Takes bytes of a chunked HTTP/1.1 body, gives whole server-sent events (RFC 9112, section 7.1)."""

    def __init__(self) -> None:
        self._raw = b""
        self._body = b""
        self.complete = False

    def feed(self, data: bytes) -> list[bytes]:
        """The events that are whole now."""
        self._raw += data
        while (size_end := self._raw.find(b"\r\n")) >= 0:
            size = int(self._raw[:size_end].partition(b";")[0], 16)
            chunk_end = size_end + 2 + size
            if len(self._raw) < chunk_end + 2:
                break
            self._body += self._raw[size_end + 2 : chunk_end]
            self._raw = self._raw[chunk_end + 2 :]
            if size == 0:
                self.complete = True
                break
        *events, self._body = self._body.split(_END_OF_EVENT)
        return events


class _Exchange(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, *, keep_events: bool) -> None:
        self._keep_events = keep_events
        self._answer: Answer | None = None
        self._done: asyncio.Future[None] | None = None
        self._head = b""
        self._body: ChunkedBody | None = None
        self._transport: asyncio.Transport | None = None
        self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self._end("the connection was closed")

    def send(self, request: bytes, answer: Answer) -> asyncio.Future[None]:
        assert self._transport is not None
        self._answer, self._head, self._body = answer, b"", None
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._done

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._body is None:
            self._head += data
            head, separator, data = self._head.partition(_END_OF_HEAD)
            if not separator:
                return
            if not head.startswith(b"HTTP/1.1 200"):
                status_line = head.partition(b"\r\n")[0].decode(errors="replace")
                self.abandon(f"answered {status_line}")
                return
            self._body = ChunkedBody()
        try:
            for event in self._body.feed(data):
                self._take(event, now)
        except (ValueError, KeyError) as error:
            self.abandon(f"sent no event: {error}")
            return
        if self._body.complete:
            self._end("" if self._answer is None or self._answer.tokens else "ended without a count of its tokens")

    def abandon(self, why: str) -> None:
        """Give up the request, and the connection with it."""
        self._end(why)
        if self._transport is not None:
            self._transport.abort()

    def _take(self, event: bytes, now: float) -> None:
        answer = self._answer
        if answer is None or event.startswith(_DONE):
            return
        if event.startswith(_ERROR):
            answer.error = json.loads(event.removeprefix(b"data: "))["error"]["message"]
        elif _USAGE in event:
            last: dict[str, Any] = json.loads(event.removeprefix(b"data: "))
            answer.tokens, answer.request_id = last["usage"]["completion_tokens"], last["id"]
        else:
            answer.times.append(now)
            if self._keep_events:
                answer.events.append(event)

    def _end(self, error: str) -> None:
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.ended_at = time.perf_counter()
            answer.error = answer.error or error
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


class Connection:
    """Asks one server for one completion after another. An async context manager."""

    def __init__(self, host: str, port: int, model: str, *, keep_events: bool = False) -> None:
        self._host, self._port, self._model = host, port, model
        self._keep_events = keep_events
        self._exchange: _Exchange | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._exchange is not None:
            self._exchange.abandon("closed")

    async def complete(
        self, prompt: str | list[int], tokens: int, answer: Answer | None = None, more: Mapping[str, Any] = _NOTHING
    ) -> Answer:
        """Exactly so many greedy tokens after the prompt (text, or token ids). A failure is told in the answer.

        Pass an `answer` to watch it while it comes, and `more` fields of the request.
        """
        request = self._request(prompt, tokens, more)
        answer = answer or Answer(0.0)
        answer.sent_at = time.perf_counter()
        try:
            exchange = await self._connected()
            await asyncio.wait_for(exchange.send(request, answer), READ_TIMEOUT_S)
        except TimeoutError:
            assert self._exchange is not None
            self._exchange.abandon(f"no end after {READ_TIMEOUT_S:g} s")
        except OSError as error:
            answer.ended_at, answer.error = time.perf_counter(), f"cannot connect: {error.strerror}"
        return answer

    async def _connected(self) -> _Exchange:
        if self._exchange is None or self._exchange.lost:
            loop = asyncio.get_running_loop()
            _, self._exchange = await loop.create_connection(
                lambda: _Exchange(keep_events=self._keep_events), self._host, self._port
            )
        return self._exchange

    def _request(self, prompt: str | list[int], tokens: int, more: Mapping[str, Any]) -> bytes:
        wanted = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **more,
        }
        body = json.dumps(wanted).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body
