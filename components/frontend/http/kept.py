"""Requests whose answers are to be kept are told from others by what their body asks for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from components.frontend.http.body import read_body, replayed
from components.frontend.http.heads import Asked
from dynamo_local.core.answers.requests import kept_fields
from dynamo_local.core.http.asgi import Receive, Scope, Send
from dynamo_local.core.http.bounds.admission import AdmissionLimits, Refusal, examine_headers

Serve = Callable[[Asked, Receive, Send], Awaitable[Refusal | None]]
"""Answers a request, or returns a refusal."""


class KeptAnswers(Protocol):
    """Keeps answers."""

    async def create(self, scope: Scope, fields: dict[str, Any], receive: Receive, send: Send) -> Refusal | None:
        """Answer a request with these fields, and keep the answer; or return a refusal."""


class Keeping:
    """Has answers kept that are to be. `others`: serves the other requests."""

    def __init__(self, answers: KeptAnswers, limits: AdmissionLimits, others: Serve) -> None:
        self._answers = answers
        self._limits = limits
        self._others = others

    async def serve(self, asked: Asked, receive: Receive, send: Send) -> Refusal | None:
        """Answer a request, or return a refusal. Raises BodyRefusedError, ClientGoneError."""
        body = await read_body(asked.headers, receive, self._limits)
        fields = kept_fields(body)
        if fields is None:
            return await self._others(asked, replayed(body, receive), send)
        refusal = examine_headers(asked.scope["headers"])
        return refusal or await self._answers.create(asked.scope, fields, receive, send)
