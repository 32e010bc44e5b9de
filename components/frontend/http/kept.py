"""Requests about answers that are kept are told from others by what their bodies ask for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec

from components.frontend.http.body import read_body, replayed
from components.frontend.http.heads import Asked
from dynamo_local.core.answers.requests import PREVIOUS, asking_fields, continued_body, is_kept
from dynamo_local.core.http.asgi import Event, Receive, Scope, Send
from dynamo_local.core.http.bounds.admission import AdmissionLimits, Refusal, examine_headers

Serve = Callable[[Asked, Receive, Send], Awaitable[Refusal | None]]
"""Answers a request, or returns a refusal."""

_NO_PREVIOUS = f'"{PREVIOUS}":null'.encode()
"""As vLLM's application writes it, nowhere but in a field of that name: quotes in texts are escaped."""


class KeptAnswers(Protocol):
    """Keeps answers."""

    async def create(self, scope: Scope, fields: dict[str, Any], receive: Receive, send: Send) -> Refusal | None:
        """Answer a request with these fields, and keep the answer; or return a refusal."""

    async def earlier(self, owner: str, fields: dict[str, Any]) -> list[Any] | Refusal:
        """Return the conversation from which a request of the owner goes on; empty: from none."""


class Keeping:
    """Serves requests that may be about answers that are kept."""

    def __init__(self, answers: KeptAnswers, limits: AdmissionLimits) -> None:
        self._answers = answers
        self._limits = limits

    async def serve(
        self, asked: Asked, receive: Receive, send: Send, others: Serve, *, keeps: bool = True
    ) -> Refusal | None:
        """Answer a request, or return a refusal. `others`: serves those whose answers are not kept; `keeps` False: all.
        Raises BodyRefusedError, ClientGoneError."""
        body = await read_body(asked.headers, receive, self._limits)
        fields = asking_fields(body)
        if fields is not None and keeps and is_kept(fields):
            refusal = examine_headers(asked.scope["headers"])
            return refusal or await self._answers.create(asked.scope, fields, receive, send)
        if fields is not None and fields.get(PREVIOUS) is not None:
            earlier = await self._answers.earlier(asked.caller.owner, fields)
            if isinstance(earlier, Refusal):
                return earlier
            body, send = continued_body(fields, earlier), _telling(fields[PREVIOUS], send)
        return await others(asked, replayed(body, receive), send)


def _telling(previous: str, send: Send) -> Send:
    """Return an ASGI `send` for an answer that goes on from another one: it tells from which, since vLLM's application
    was not told."""
    named = _NO_PREVIOUS.removesuffix(b"null") + msgspec.json.encode(previous)

    async def send_on(event: Event) -> None:
        if event["type"] == "http.response.start":
            headers = [header for header in event["headers"] if header[0].lower() != b"content-length"]
            await send({**event, "headers": headers})
        else:
            await send({**event, "body": event.get("body", b"").replace(_NO_PREVIOUS, named)})

    return send_on
