"""Which conversations a model has answered, and whether its workers have dropped what they had cached of them. Pure.

A conversation is recognised by what its requests begin with. Its cache counts as dropped if since its last answer there
was a moment at which no worker was left that had its cache: they were parked, or ended.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import islice
from typing import Any

MOST = 4096
"""Conversations that are remembered for each model, the latest ones."""

_HEAD = 64
"""Characters, or token ids, of a prompt without messages that tell conversations apart. A shorter one is none."""
_ENDS = 256
"""Characters at both ends of a message that tell it from others."""
_PARTS = 8
_DEPTH = 4


def conversation_of(fields: Mapping[str, Any]) -> int | None:
    """What all requests of a conversation have in common, as a number: the messages up to the first one of the user, or
    the head of a prompt. None: nothing tells. The time does not grow with the request."""
    messages = fields.get("messages", fields.get("input"))
    if isinstance(messages, list):
        return _of_messages(messages)
    prompt = fields.get("prompt", messages)
    if not isinstance(prompt, str | list) or len(prompt) < _HEAD:
        return None
    head = prompt[:_HEAD]
    if isinstance(head, list) and not all(isinstance(token, int) for token in head):
        return None
    return hash(tuple(head))


class Conversations:
    """The conversations of one model."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._answered: dict[int, int] = {}
        """By conversation, the oldest first, the number of drops before its last answer."""
        self._drops = 0
        self._holders: frozenset[str] = frozenset()
        """Leases of workers that have what was cached since the last drop."""
        self.cold = 0
        """Requests of conversations whose cache had been dropped."""

    def follow(self, ready: Collection[str], parked: Collection[str]) -> None:
        """Follow a change of the model's workers, by leases. One that is silent for a moment has dropped nothing."""
        holders = self._holders - frozenset(parked)
        if ready and not holders.intersection(ready):
            self._drops += 1
        self._holders = frozenset(ready) if ready else holders

    def is_known(self, conversation: int | None) -> bool:
        """Whether it was answered here, not too long ago."""
        return conversation in self._answered

    def answer(self, conversation: int | None) -> bool:
        """Note that the conversation goes on. Returns whether its cache was dropped since its last answer."""
        if conversation is None:
            return False
        before = self._answered.pop(conversation, None)
        self._answered[conversation] = self._drops
        if len(self._answered) > self._most:
            del self._answered[next(iter(self._answered))]
        is_cold = before is not None and before < self._drops
        self.cold += is_cold
        return is_cold


def _of_messages(messages: list[Any]) -> int | None:
    found: list[Any] = []
    for message in islice(messages, _PARTS):
        found.append(_gist(message))
        if isinstance(message, dict) and message.get("role") == "user":
            return hash(tuple(found))
    return None


def _gist(value: Any, depth: int = _DEPTH) -> Any:
    """A part of a message in short."""
    if isinstance(value, str):
        return len(value), value[:_ENDS], value[-_ENDS:]
    if not depth or not isinstance(value, dict | list):
        return value if isinstance(value, int | float | None) else str(type(value))
    parts = value.items() if isinstance(value, dict) else enumerate(value)
    return tuple((key, _gist(part, depth - 1)) for key, part in islice(parts, _PARTS))
