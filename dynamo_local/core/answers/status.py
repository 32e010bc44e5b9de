"""The states of an answer, and what its events make of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

QUEUED: Final = "queued"
IN_PROGRESS: Final = "in_progress"
COMPLETED: Final = "completed"
INCOMPLETE: Final = "incomplete"
FAILED: Final = "failed"
CANCELLED: Final = "cancelled"

ENDS = frozenset({COMPLETED, INCOMPLETE, FAILED, CANCELLED})

NEXT: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "": frozenset({QUEUED}),
        QUEUED: frozenset({QUEUED, IN_PROGRESS, FAILED, CANCELLED}),
        IN_PROGRESS: ENDS,
        **dict.fromkeys(ENDS, frozenset[str]()),
    }
)
"""States that may follow a state; the empty one is that before the first event."""

_ITEM_DONE = "response.output_item.done"


class OutOfOrderError(ValueError):
    """An event leads to a state that cannot follow."""


class AnswerState:
    """An answer as its events tell it so far. `events`: their number, which is the next sequence number."""

    def __init__(self) -> None:
        self.events = 0
        self.response: dict[str, Any] = {}
        """The object that clients get, in OpenAI's shape."""

    @property
    def status(self) -> str:
        """One of the states above; empty before the first event."""
        status: str = self.response.get("status", "")
        return status

    @property
    def has_ended(self) -> bool:
        """Whether no event follows."""
        return self.status in ENDS

    def take(self, event: Mapping[str, Any]) -> None:
        """Take the next event. Raises OutOfOrderError, and changes nothing then."""
        response = event.get("response")
        if isinstance(response, dict):
            if response.get("status") not in NEXT[self.status]:
                raise OutOfOrderError(f"{event.get('type')} after {self.status or 'nothing'}")
            self.response = response
        elif self.status != IN_PROGRESS:
            raise OutOfOrderError(f"{event.get('type')} while {self.status or 'nothing'}")
        elif event.get("type") == _ITEM_DONE:
            # What is done is shown to those who look before the end.
            self.response = {**self.response, "output": [*self.response.get("output", ()), event.get("item")]}
        self.events += 1

    def changed(self, status: str, **fields: Any) -> dict[str, Any]:
        """Return the event that leads to another state, with these fields of the object changed."""
        response = {**self.response, **fields, "status": status}
        return numbered({"type": f"response.{status}", "response": response}, self.events)

    def failed(self, message: str, code: str = "server_error") -> dict[str, Any]:
        """Return the event of a failure."""
        return self.changed(FAILED, error={"code": code, "message": message})


def numbered(event: dict[str, Any], number: int) -> dict[str, Any]:
    """Return the event with its sequence number."""
    return {**event, "sequence_number": number}


def ended(event: dict[str, Any]) -> dict[str, Any]:
    """Return vLLM's last event, which it calls "completed" whatever the end was, with the name that OpenAI has."""
    status = event.get("response", {}).get("status")
    known = event.get("type") == "response.completed" and status in ENDS
    return {**event, "type": f"response.{status}"} if known else event


def stream_event(content: Mapping[str, Any], data: bytes) -> bytes:
    """Return a server-sent event. `data`: the event as JSON, `content`: the same, read."""
    return b"event: " + str(content.get("type", "message")).encode() + b"\ndata: " + data + b"\n\n"
