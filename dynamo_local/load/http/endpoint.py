"""The API of the server under load: its address, its requests, and queries for its model and tokens."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec

from dynamo_local.core.addresses import host_in_url
from dynamo_local.core.errors import UsageError
from dynamo_local.load.errors import ExchangeError, LoadError
from dynamo_local.load.http.answers import refusal
from dynamo_local.load.http.connection import Connections
from dynamo_local.load.workload.prompts import WORDS

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
