"""An answer that goes on after a restart: its events are made again from its tokens, and those that are known are not
sent twice. Pure.

vLLM makes the events of an answer from its tokens. Made again, they differ in the ids that vLLM draws, and in how the
text is cut into deltas. Ids get the values that they had. Of a delta that is known in part, the rest is sent. Anything
else that differs ends the answer: a sequence number never changes its meaning.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

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

    @property
    def is_past(self) -> bool:
        """Whether all that was known has been made again."""
        return not self._known

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
