"""The answer of vLLM's application to a request whose answer is kept: an ASGI `send` that takes its events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from dynamo_local.core.http.asgi import Event, begins_event_stream
from dynamo_local.load.http.body import Events

_events = msgspec.json.Decoder(dict[str, Any])


class AnswerSink:
    """Takes one answer. `status`: None until it begins. `error`: an error that came as an event.

    `take` gets each other event; what it raises ends the application's call.
    """

    def __init__(self, take: Callable[[dict[str, Any]], None], begun: Callable[[], None]) -> None:
        """`begun` is called when a stream of events has begun: the application has accepted the request."""
        self._take = take
        self._begun = begun
        self._events = Events()
        self._is_stream = False
        self.status: int | None = None
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = b""
        """Of an answer that is no stream of events."""
        self.error: dict[str, Any] | None = None

    async def __call__(self, event: Event) -> None:
        if event["type"] == "http.response.start":
            self.status, self.headers = event["status"], list(event["headers"])
            self._is_stream = event["status"] == 200 and begins_event_stream(event)
            if self._is_stream:
                self._begun()
        elif self._is_stream:
            for data in self._events.feed(event.get("body", b"")):
                self._take_event(_events.decode(data))
        else:
            self.body += event.get("body", b"")

    @property
    def refusal(self) -> tuple[int, str] | None:
        """Status and message of a refusal, or of an error event. None: there was neither."""
        error = self.error
        if error is not None:
            code = str(error.get("code", ""))
            return int(code) if code.isdigit() else 500, str(error.get("message"))
        if self.status is None or self._is_stream:
            return None
        return self.status, self._message()

    def _take_event(self, event: dict[str, Any]) -> None:
        if event.get("type") == "error":
            self.error = event
        elif isinstance(event.get("error"), dict):
            self.error = event["error"]
        else:
            self._take(event)

    def _message(self) -> str:
        try:
            return str(msgspec.json.decode(self.body)["error"]["message"])
        except (msgspec.MsgspecError, UnicodeError, KeyError, TypeError):
            return self.body.decode(errors="replace")[:200]
