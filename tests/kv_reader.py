"""A reader of what a worker publishes of its cached blocks, by the letter of core/messages/kv.py."""

from __future__ import annotations

from dataclasses import dataclass, field

from dynamo_local.core.messages.kv import KvChanges
from dynamo_local.core.routing.caches.index import unpack


@dataclass
class KvReader:
    number: int | None = None
    """Of the last changes that it knows; None: it is not in step."""
    keys: set[int] = field(default_factory=set)
    _parts: dict[int, bytes] = field(default_factory=dict)

    def read(self, message: KvChanges) -> None:
        if message.parts:
            self._repeat(message)
        elif self.number is not None and message.number == self.number + 1:
            self.number += 1
            if message.cleared:
                self.keys.clear()
            self.keys -= set(unpack(message.removed))
            self.keys |= set(unpack(message.stored))
        elif self.number is None or message.number > self.number:
            self.number = None

    def _repeat(self, message: KvChanges) -> None:
        if self.number is not None and self.number >= message.number:
            return
        if message.part == 0:
            self._parts = {}
        self._parts[message.part] = message.stored
        if message.part == message.parts - 1:
            if len(self._parts) == message.parts:
                self.number = message.number
                self.keys = {key for part in self._parts.values() for key in unpack(part)}
            self._parts = {}
