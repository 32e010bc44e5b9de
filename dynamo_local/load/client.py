"""A client of one model behind an OpenAI API, which measures the answers that it streams.

`dynamo load` sends its requests with it (session.py); benchmarks and tests ask for one completion at a time.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import msgspec

from dynamo_local.core.addresses import host_in_url
from dynamo_local.core.errors import UsageError
from dynamo_local.load.connection import Connections, Events, ExchangeError, LoadError
from dynamo_local.load.figures import CUT_OFF, Completion, Record
from dynamo_local.load.workload import WORDS

# The API of the server under load: its address, its requests, and queries for its model and tokens.

_PATIENCE_S = 30.0
_OURS = ("max_tokens", "messages", "model", "prompt", "stream")
"""Fields of a request that the load sets itself."""

SAFE_TOKENS = range(100, 1000)
"""Token ids used if the server has no `/tokenize`: ordinary tokens in most vocabularies."""


@dataclass(frozen=True)
class Endpoint:
    """The address of the API, and its key."""

    host: str
    port: int
    is_tls: bool
    path: str
    """Path before /v1, without a final slash."""
    key: str | None = None

    @property
    def url(self) -> str:
        return f"{'https' if self.is_tls else 'http'}://{host_in_url(self.host)}:{self.port}{self.path}"

    def connections(self) -> Connections:
        return Connections(self.host, self.port, ssl.create_default_context() if self.is_tls else None)

    def request(self, method: str, path: str, body: bytes = b"", headers: Sequence[str] = ()) -> bytes:
        """Return the bytes of a request. `headers`: further ones, as lines."""
        lines = [
            f"{method} {self.path}{path} HTTP/1.1",
            f"Host: {host_in_url(self.host)}:{self.port}",
            "User-Agent: dynamo-local",
            "Accept: */*",
            *headers,
            *([f"Authorization: Bearer {self.key}"] if self.key else []),
            *([f"Content-Type: application/json\r\nContent-Length: {len(body)}"] if method == "POST" else []),
        ]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def parse_url(url: str, key: str | None = None) -> Endpoint:
    """Parse an address http://HOST:PORT, with or without /v1 at its end. Raises UsageError."""
    remedy = "write for example http://127.0.0.1:8000"
    try:
        parts = urlsplit(url)
        port = parts.port
        (parts.hostname or "").encode("idna")
    except ValueError as error:
        raise UsageError(f"{url!r} is not an address: {error}", remedy) from error
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise UsageError(f"{url!r} is not the address of an API", remedy)
    if parts.username is not None or parts.password is not None:
        raise UsageError("the address holds a password", "give keys with --api-key-file or OPENAI_API_KEY")
    if not f"{parts.hostname}{parts.path}".isascii() or any(sign.isspace() for sign in url):
        raise UsageError(f"{url!r} is not the address of an API", remedy)
    if key is not None and not (key.isascii() and key.isprintable() and " " not in key):
        raise UsageError("the API key has characters that no header can carry", "look at its file")
    is_tls = parts.scheme == "https"
    path = parts.path.rstrip("/").removesuffix("/v1")
    return Endpoint(parts.hostname, port or (443 if is_tls else 80), is_tls, path, key)


@dataclass(frozen=True)
class Asking:
    """The form of the requests that carry prompts."""

    model: str
    is_chat: bool
    ignore_eos: bool
    extra: Mapping[str, Any]
    """Additional fields of each request."""

    def template(self) -> tuple[str, bytes]:
        """Return the path, and the body up to the prompt. Raises UsageError for a field that the load sets itself."""
        if taken := sorted(set(_OURS) & set(self.extra)):
            raise UsageError(f"{taken[0]} is set by the load itself", "leave it out of --body")
        fields: dict[str, Any] = {
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            **({"ignore_eos": True} if self.ignore_eos else {}),
            **self.extra,
        }
        begin = msgspec.json.encode(fields)[:-1]
        if self.is_chat:
            return "/v1/chat/completions", begin + b',"messages":[{"role":"user","content":'
        return "/v1/completions", begin + b',"prompt":'

    def end(self, output_tokens: int) -> bytes:
        """Return the body after the prompt."""
        return (b"}]" if self.is_chat else b"") + b',"max_tokens":%d}' % output_tokens


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: tuple[_Model, ...]


class _Tokens(msgspec.Struct):
    tokens: tuple[int, ...]


async def find_model(connections: Connections, endpoint: Endpoint, wanted: str | None) -> tuple[str, int | None]:
    """The model to ask, and the length of its context if the server tells. Raises LoadError."""
    try:
        found = msgspec.json.decode(await ask(connections, endpoint.request("GET", "/v1/models")), type=_Models).data
    except msgspec.DecodeError as error:
        raise LoadError(f"{endpoint.url}/v1/models does not answer as OpenAI's API does: {error}") from error
    except ExchangeError as error:
        if wanted is not None and error.kind == "HTTP 404":
            return wanted, None
        raise LoadError(f"{endpoint.url}/v1/models: {_told(error)}", _remedy(error)) from error
    for model in found:
        if wanted in (None, model.id):
            return model.id, model.max_model_len
    names = ", ".join(model.id for model in found) or "none"
    raise LoadError(f"{endpoint.url} has no model {wanted or 'at all'}", f"it has {names}")


async def find_tokens(connections: Connections, endpoint: Endpoint, model: str) -> Sequence[int] | None:
    """Return ids of ordinary tokens: those of common words, by vLLM's `/tokenize`. None if the server has none."""
    body = msgspec.json.encode({"model": model, "prompt": " ".join(WORDS), "add_special_tokens": False})
    try:
        answer = await ask(connections, endpoint.request("POST", "/tokenize", body))
        return sorted(set(msgspec.json.decode(answer, type=_Tokens).tokens)) or None
    except (ExchangeError, msgspec.DecodeError):
        return None


async def ask(connections: Connections, request: bytes) -> bytes:
    """The body of an answer with status 200, which is not streamed. Raises ExchangeError."""
    parts: list[bytes] = []
    try:
        async with asyncio.timeout(_PATIENCE_S):
            answer = await connections.exchange(request, lambda part, now: parts.append(part))
    except TimeoutError as error:
        raise ExchangeError("timeout", f"no answer within {_PATIENCE_S:g} s") from error
    if answer.status != 200:
        raise refusal(answer.status, answer.body)
    return b"".join(parts)


def _told(error: ExchangeError) -> str:
    return f"{error.kind}: {error.cause}" if error.kind.startswith("HTTP") else error.cause


def _remedy(error: ExchangeError) -> str:
    if error.kind in ("HTTP 401", "HTTP 403"):
        return "give the key with --api-key-file or OPENAI_API_KEY"
    return "is that the address of a server that runs? see --url"


# Reads streamed completions and error answers of an OpenAI API.

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


TIMEOUT_S = 120.0


class Client:
    """Sends requests to the model over reused connections, one at a time on each. An async context manager."""

    def __init__(
        self,
        endpoint: Endpoint,
        asking: Asking,
        timeout_s: float = TIMEOUT_S,
        connections: Connections | None = None,
    ) -> None:
        """`timeout_s` bounds each request. `connections`: shared with other clients; None: the client's own. Raises
        UsageError for fields in `asking` that the client sets itself."""
        self._endpoint, self._asking, self._timeout_s = endpoint, asking, timeout_s
        self._connections = connections or endpoint.connections()
        self._path, self._begin = asking.template()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the free connections. A connection in use closes when its request is cancelled."""
        self._connections.close()

    def request(self, prompt: bytes, output_tokens: int) -> bytes:
        """Return the bytes of a request for a completion. `prompt`: as JSON, a string or an array of token ids."""
        body = self._begin + prompt + self._asking.end(output_tokens)
        return self._endpoint.request("POST", self._path, body)

    async def complete(
        self, prompt: str | Sequence[int], output_tokens: int, completion: Completion | None = None
    ) -> Completion:
        """Request a completion of a prompt (text, or token ids), and wait for its end.

        Times are those of `time.monotonic`. A failure is recorded in the completion and not raised; a cancellation is
        recorded and raised. Pass a `completion` to watch it while it arrives.
        """
        completion = completion or Completion()
        completion.output_tokens = output_tokens
        request = self.request(msgspec.json.encode(prompt), output_tokens)
        completion.at_s = time.monotonic()
        await self.send(request, completion)
        return completion

    async def send(self, request: bytes, record: Record, begin_s: float = 0.0) -> None:
        """Send a request and fill its record, whose times count from `begin_s` (`time.monotonic`). A failure is
        recorded and not raised; a cancellation is recorded and raised."""
        reader = AnswerReader(record)
        last_s = record.sent_s = time.monotonic() - begin_s

        def take(part: bytes, now: float) -> None:
            nonlocal last_s
            last_s = now - begin_s
            reader.take(part, last_s)

        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._connections.exchange(request, take)
            if answer.status != 200:
                raise refusal(answer.status, answer.body)
            reader.end()
        except ExchangeError as error:
            record.error, record.detail = error.kind, error.cause
        except TimeoutError:
            record.error, record.detail = "timeout", f"no end within {self._timeout_s:g} s"
        except asyncio.CancelledError:
            record.error, record.detail = CUT_OFF, "the request was cancelled"
            raise
        finally:
            if record.error:
                record.ended_s = time.monotonic() - begin_s
                record.tokens = record.tokens or len(record.chunks_s)
            else:
                record.ended_s = last_s
