"""Answers that the gate gives itself, without the OpenAI server, and errors in the shape of the API that was asked."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo_local.core.http.asgi import Event, Send
from dynamo_local.core.http.bounds.admission import Refusal
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
