"""A request that generates, and the way to its client."""

from __future__ import annotations

from typing import Any

import msgspec

from components.frontend.http.body import replayed
from components.frontend.http.generations.held import EarlyAnswer
from components.frontend.http.outgoing import Outgoing, Renaming
from dynamo_local.core.http.asgi import Receive, Scope, Send
from dynamo_local.core.http.bounds.admission import Refusal
from dynamo_local.core.http.json_text import boolean
from dynamo_local.core.http.waiting.conversations import conversation_of
from dynamo_local.core.priority.classes import PriorityClass, class_of

RETRY_NO_WORKER_S = 2
"""Seconds until a client that was refused for want of a worker may ask again."""


class GenerationRequest(msgspec.Struct, frozen=True):
    """A request that generates. `fields`: of its body. `streams`: it asks for a stream of events."""

    scope: Scope
    body: bytes
    fields: dict[str, Any]
    streams: bool
    priority: int = 0
    key: str = ""
    """The API key that it came with; empty: none."""

    @property
    def priority_class(self) -> PriorityClass:
        """The class of its priority."""
        return class_of(self.priority)

    @property
    def conversation(self) -> int | None:
        """The conversation that it belongs to, as `core.http.conversations` recognises it."""
        return conversation_of(self.fields)

    @property
    def model(self) -> str | None:
        """The model that it names."""
        name = self.fields.get("model")
        return name if isinstance(name, str) else None

    @property
    def searches_beams(self) -> bool:
        """Whether the answer is the best of many that engines begin, each token of them as a request of its own."""
        return boolean(self.fields.get("use_beam_search")) is True


class Exchange(msgspec.Struct, frozen=True):
    """A request and the way to its client. `after_body` gives what comes after the body. `renaming`: of settings, in
    answers."""

    request: GenerationRequest
    after_body: Receive
    early: EarlyAnswer
    renaming: Renaming

    def receive(self) -> Receive:
        """Return a `receive` for an application, which begins with the body."""
        return replayed(self.request.body, self.after_body)

    def send(self) -> Send:
        """Return a `send` for an application."""
        return Outgoing(self.early, self.renaming, RETRY_NO_WORKER_S)


def unavailable(why: str, *, retry_s: int | None = RETRY_NO_WORKER_S) -> Refusal:
    """Return the refusal of a request that may be sent again in `retry_s` seconds; None: that helps nothing."""
    return Refusal(503, why, "ServiceUnavailableError", retry_after_s=retry_s)
