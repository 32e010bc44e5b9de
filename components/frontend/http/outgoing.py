"""What goes out as the answer to a request: answers that the frontend gives itself, errors in the shape of the API that
was asked, and what is changed in the answers of a model's application."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import msgspec

from dynamo_local.core.errors import ConfigError, DynamoError, ItemAbsentError, StorageFullError
from dynamo_local.core.http.asgi import Event, Scope, Send, begins_event_stream, header
from dynamo_local.core.http.bounds.admission import Refusal
from dynamo_local.core.http.bounds.limits import NEVER
from dynamo_local.core.http.dialects import changes_errors, error_answer

JSON = (b"content-type", b"application/json")


async def answer(send: Send, status: int, body: bytes, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    """Send one whole answer."""
    await send({"type": "http.response.start", "status": status, "headers": with_length(headers, len(body))})
    await send({"type": "http.response.body", "body": body})


async def refuse(send: Send, refusal: Refusal) -> None:
    """Send a refusal, in OpenAI's error shape."""
    headers = [JSON, *refusal.headers]
    if refusal.retry_after_s is not None:
        headers.append((b"retry-after", str(refusal.retry_after_s).encode()))
    if refusal.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if refusal.allowed:
        headers.append((b"allow", ", ".join(sorted(refusal.allowed)).encode()))
    if refusal.status == 408:
        # The rest of this request's body must not be read as the next request.
        headers.append((b"connection", b"close"))
    await answer(send, refusal.status, refusal.body(), headers)


def with_length(headers: Sequence[tuple[bytes, bytes]], length: int) -> list[tuple[bytes, bytes]]:
    """Return the headers of an answer whose body has this length, which it may have changed."""
    others = [(name, value) for name, value in headers if name.lower() != b"content-length"]
    return [*others, (b"content-length", b"%d" % length)]


def in_dialect(path: str, send: Send) -> Send:
    """Return an ASGI `send` for the answer to a request at this path, whose errors are changed to the shape of the API
    there, whoever makes them."""
    return _Translated(path, send) if changes_errors(path) else send


class _Translated:
    """Holds back an error until it has its whole body; all else passes as it is."""

    def __init__(self, path: str, send: Send) -> None:
        self._path = path
        self._send = send
        self._start: Event | None = None
        """The beginning of an error."""
        self._body = bytearray()

    async def __call__(self, event: Event) -> None:
        if event["type"] == "http.response.start" and event["status"] >= 400:
            self._start = event
        elif self._start is None:
            await self._send(event)
        else:
            self._body += event.get("body", b"")
            if not event.get("more_body", False):
                start, self._start = self._start, None
                body = error_answer(self._path, start["status"], bytes(self._body))
                await answer(self._send, start["status"], body, start["headers"])


# What requests about stored things have in common: errors as refusals, and pages of lists.

_RETRY_S = 5

_T = TypeVar("_T")


def refusal_of(error: DynamoError) -> Refusal:
    """Return the refusal of a request that a store cannot carry out."""
    if isinstance(error, ItemAbsentError):
        return Refusal(404, error.cause, "NotFoundError", "id")
    if isinstance(error, ConfigError):
        return Refusal(400, str(error), "BadRequestError")
    if isinstance(error, StorageFullError):
        # Sent again, it would only grow the shortage.
        return Refusal(507, str(error), "InsufficientStorageError", headers=NEVER)
    cause = error.__cause__
    if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
        return Refusal(507, f"the server's disk is full: {error.cause}", "InsufficientStorageError", headers=NEVER)
    return Refusal(503, str(error), "ServiceUnavailableError", retry_after_s=_RETRY_S)


async def answer_json(send: Send, content: Any) -> None:
    """Answer with status 200."""
    await answer(send, 200, msgspec.json.encode(content), [JSON])


def query_of(scope: Scope, known: frozenset[str]) -> dict[str, str]:
    """Return the parameters of a query. Raises ConfigError for others than the known ones."""
    asked = dict(parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True))
    if unknown := asked.keys() - known:
        raise ConfigError(f"there is no parameter {min(unknown)[:60]!r}")
    return asked


def page(
    items: Sequence[_T], asked: Mapping[str, str], id_of: Callable[[_T], str], shown: Callable[[_T], Any], most: int
) -> dict[str, Any]:
    """Return a page of a list as OpenAI's clients know it. `asked`: with `after`, the id before its first item, and
    `limit`; `most`: the limit at most, and if none is asked for. Raises ConfigError."""
    limit = asked.get("limit", str(most))
    if not (limit.isascii() and limit.isdigit() and len(limit) < 9 and 1 <= int(limit) <= most):
        raise ConfigError(f"limit must be a number from 1 to {most}, got {limit[:20]!r}")
    begin = 0
    if after := asked.get("after"):
        begin = next((index + 1 for index, item in enumerate(items) if id_of(item) == after), len(items))
    found = items[begin : begin + int(limit)]
    return {
        "object": "list",
        "data": [shown(item) for item in found],
        "first_id": id_of(found[0]) if found else None,
        "last_id": id_of(found[-1]) if found else None,
        "has_more": begin + len(found) < len(items),
    }


# What is changed in the answers of an application: headers, names of settings, and errors before the first token.
#
# The OpenAI server begins a stream with status 200 before the engine has looked at the request. An error before the
# first token is then an event in a stream that was called a success. Here the beginning waits for the first event: if
# that is an error, the client is answered with its status, as if it had not asked for a stream.

_STREAM_HEADERS = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
"""Headers that keep caches from storing event streams, and nginx from buffering them."""

_OPTION = re.compile(rb"(?<![\w-])--([a-z0-9]+(?:-[a-z0-9]+)*)")

_DATA = b"data: "


def stream_headers(headers: Collection[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the headers of an event stream with those that forbid caching and buffering."""
    there = {name.lower() for name, _ in headers}
    return [*headers, *(header for header in _STREAM_HEADERS if header[0] not in there)]


class Renaming:
    """Renames vLLM's options to the settings that set them: --tool-call-parser to --Frontend.tool-call-parser, if the
    service `Frontend` has that setting."""

    def __init__(self, service: str, settings: Collection[str]) -> None:
        self._service, self._settings = service.encode(), frozenset(name.encode() for name in settings)

    def __call__(self, text: bytes) -> bytes:
        """Return the text with the names of settings."""
        return _OPTION.sub(self._renamed, text)

    def _renamed(self, option: re.Match[bytes]) -> bytes:
        return b"--%s.%s" % (self._service, option[1]) if option[1] in self._settings else option[0]


class Outgoing:
    """An ASGI `send` for one answer of an application. Refusals name settings; every 503 tells to come again in
    `retry_s` seconds; event streams forbid caching and buffering, and begin with their first event.

    Most answers need none of it, and each of their parts passes here, so it is no coroutine then.
    """

    def __init__(self, send: Send, renaming: Renaming, retry_s: int) -> None:
        self._send = send
        self._renaming = renaming
        self._retry_s = retry_s
        self._start: Event | None = None
        """The beginning of the answer, as long as it waits for what comes next."""
        self._is_over = False
        """Whether the answer was an error, of which the client has the whole."""

    def __call__(self, event: Event) -> Awaitable[None]:
        if event["type"] == "http.response.start":
            return self._begin(event)
        if self._start is None and not self._is_over:
            return self._send(event)
        return self._go_on(event)

    def _begin(self, event: Event) -> Awaitable[None]:
        is_stream = begins_event_stream(event)
        if is_stream:
            event = {**event, "headers": stream_headers(event["headers"])}
        if event["status"] == 400 or (is_stream and event["status"] == 200):
            self._start = event
            return _nothing()
        return self._send(self._retried(event))

    async def _go_on(self, event: Event) -> None:
        """Send what follows a beginning that waits; nothing of what follows an error."""
        start, body = self._start, event.get("body", b"")
        if start is None or (start["status"] == 200 and not body and event.get("more_body", False)):
            return
        self._start = None
        if start["status"] == 200 and (error := _error_in(body)) is not None:
            status, body = error
            self._is_over = True
            event = {"type": "http.response.body", "body": body, "more_body": False}
            start = self._retried({"type": "http.response.start", "status": status, "headers": [JSON]})
            start["headers"] = with_length(start["headers"], len(body))
        if start["status"] == 400 and not event.get("more_body", False):
            event = {**event, "body": self._renaming(body)}
            start = {**start, "headers": with_length(start["headers"], len(event["body"]))}
        await self._send(start)
        await self._send(event)

    def _retried(self, start: Event) -> Event:
        if start["status"] != 503 or header(start, b"retry-after"):
            return start
        return {**start, "headers": [*start["headers"], (b"retry-after", b"%d" % self._retry_s)]}


async def _nothing() -> None:
    """Send nothing yet."""


def _error_in(body: bytes) -> tuple[int, bytes] | None:
    """Return the status and the body of the error, if the first event is one."""
    if not body.startswith(_DATA + b'{"error"'):
        return None
    line = body.partition(b"\n")[0].removeprefix(_DATA)
    try:
        code = json.loads(line)["error"]["code"]
    except (ValueError, KeyError, TypeError):
        return None
    return (code, line) if isinstance(code, int) and 400 <= code <= 599 else None
