"""Events of an answer that is kept: the state that they lead to, and how one goes on that was broken off. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

# The states of an answer, and what its events make of it. Pure.

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
        """State of the answer, one of those above; empty before the first event."""
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


# An answer that goes on after a restart: its events are made again from its tokens, and those that are known are not
# sent twice. Pure.
#
# vLLM makes the events of an answer from its tokens. Made again, they differ in the ids that vLLM draws, and in how the
# text is cut into deltas. Ids get the values that they had. Of a delta that is known in part, the rest is sent.
# Anything else that differs ends the answer: a sequence number never changes its meaning.

_IDS = frozenset({"id", "item_id", "call_id"})
_CUT = frozenset({"delta", "logprobs", "sequence_number"})
"""Fields that depend on how a text was cut."""


class DifferentAnswerError(ValueError):
    """What was made again is not what clients have seen."""


class Continuation:
    """Compares the events that are made with those of the journal. `known`: the latter, from the first one on that vLLM
    makes."""

    def __init__(self, known: Iterable[dict[str, Any]] = ()) -> None:
        self._known = deque(known)
        self._ids: dict[str, str] = {}

    def take(self, event: dict[str, Any]) -> list[dict[str, Any]]:
        """Take the next event that is made. Returns what is new of it: nothing, or one event.

        Raises DifferentAnswerError.
        """
        self._drop_empty()
        if _is_delta(event):
            return self._take_text(event)
        if not self._known:
            return [self._renamed(event)]
        self._match(event, self._known.popleft())
        return []

    def _take_text(self, event: dict[str, Any]) -> list[dict[str, Any]]:
        was_empty = not event["delta"]
        while event["delta"] and self._known and _is_delta(self._known[0]):
            self._match(event, self._known[0])
            event, self._known[0] = _without_common(event, self._known[0])
            self._drop_empty()
        if self._known:
            if event["delta"]:
                raise DifferentAnswerError(f"{event['type']} where {self._known[0]['type']} was before")
            return []
        return [self._renamed(event)] if event["delta"] or was_empty else []

    def _drop_empty(self) -> None:
        while self._known and _is_delta(self._known[0]) and not self._known[0]["delta"]:
            self._known.popleft()

    def _match(self, made: dict[str, Any], known: dict[str, Any]) -> None:
        if made["type"] != known["type"]:
            raise DifferentAnswerError(f"{made['type']} where {known['type']} was before")
        skipped: frozenset[str] = _CUT if _is_delta(made) else frozenset({"sequence_number"})
        mine = {name: value for name, value in made.items() if name not in skipped}
        before = {name: value for name, value in known.items() if name not in skipped}
        if not self._same(mine, before, ""):
            raise DifferentAnswerError(f"{made['type']} differs from what it was before")

    def _same(self, made: Any, known: Any, name: str) -> bool:
        if name in _IDS and isinstance(made, str) and isinstance(known, str):
            return self._ids.setdefault(made, known) == known
        if isinstance(made, dict) and isinstance(known, dict):
            return made.keys() == known.keys() and all(self._same(made[key], known[key], key) for key in made)
        if isinstance(made, list) and isinstance(known, list):
            return len(made) == len(known) and all(map(self._same, made, known, [""] * len(made)))
        return bool(made == known)

    def _renamed(self, value: Any, name: str = "") -> Any:
        """Give ids the values that they had."""
        if not self._ids:
            return value
        if isinstance(value, str):
            return self._ids.get(value, value) if name in _IDS else value
        if isinstance(value, dict):
            return {key: self._renamed(one, key) for key, one in value.items()}
        if isinstance(value, list):
            return [self._renamed(one) for one in value]
        return value


def _is_delta(event: dict[str, Any]) -> bool:
    return str(event.get("type")).endswith(".delta") and isinstance(event.get("delta"), str)


def _without_common(one: dict[str, Any], other: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Take off both the text with which both begin, which is all of the shorter one."""
    common = min(len(one["delta"]), len(other["delta"]))
    if one["delta"][:common] != other["delta"][:common]:
        raise DifferentAnswerError(f"{one['type']} has another text than before")
    tokens = min(len(one.get("logprobs") or ()), len(other.get("logprobs") or ()))
    return _without_first(one, common, tokens), _without_first(other, common, tokens)


def _without_first(event: dict[str, Any], characters: int, tokens: int) -> dict[str, Any]:
    rest = {**event, "delta": event["delta"][characters:]}
    if event.get("logprobs"):
        rest["logprobs"] = event["logprobs"][tokens:]
    return rest
