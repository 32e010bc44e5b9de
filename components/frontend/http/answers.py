"""Answers that the gate gives itself, without the OpenAI server."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo_local.core.http.asgi import Send
from dynamo_local.core.http.bounds.admission import Refusal

JSON = (b"content-type", b"application/json")


async def answer(send: Send, status: int, body: bytes, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    """Send one whole answer."""
    all_headers = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": all_headers})
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
