"""A worker's record of the blocks that its engine has cached, and what it publishes of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from dynamo_local.core.messages.kv import MOST_KEYS, KvChanges
from dynamo_local.core.ports import CacheChanges
from dynamo_local.core.routing.caches.index import pack, unpack


class CacheMirror:
    """The keys of one engine's cached blocks: those that have been published, and changes that have not been yet.

    Pure. Changes that come between two calls of `take` are published as one: a block that comes and goes again is never
    told of.
    """

    def __init__(self, worker: str, *, most_keys: int = MOST_KEYS) -> None:
        self._worker = worker
        self._most_keys = most_keys
        self._number = 0
        """Number of the last message with changes."""
        self._published: set[int] = set()
        """What a reader has who knows all messages so far."""
        self._cleared = False
        self._removed: dict[int, None] = {}
        self._stored: dict[int, None] = {}

    @property
    def has_news(self) -> bool:
        """Whether anything has changed that has not been published."""
        return bool(self._cleared or self._removed or self._stored)

    def __contains__(self, key: int) -> bool:
        return key in self._stored or (self._stands(key) and key not in self._removed)

    def __len__(self) -> int:
        """Number of cached blocks."""
        return (0 if self._cleared else len(self._published)) - len(self._removed) + len(self._stored)

    def keys(self) -> set[int]:
        """The keys of all cached blocks."""
        published = set() if self._cleared else self._published
        return (published - self._removed.keys()) | self._stored.keys()

    def apply(self, changes: CacheChanges) -> None:
        """Note what a step has changed. Raises DecodeError."""
        if changes.cleared:
            self._stored.clear()
            self._removed.clear()
            self._cleared = bool(self._published)
        for key in unpack(changes.removed):
            self._stored.pop(key, None)
            if self._stands(key):
                self._removed[key] = None
        for key in unpack(changes.stored):
            self._removed.pop(key, None)
            if not self._stands(key):
                self._stored[key] = None

    def take(self) -> list[KvChanges]:
        """The messages that tell what has changed, in order. From now on it counts as published."""
        cleared, portions = self._cleared, list(self._portions())
        if cleared:
            self._published.clear()
            portions = portions or [((), ())]
        self._published.difference_update(self._removed)
        self._published.update(self._stored)
        self._cleared = False
        self._removed.clear()
        self._stored.clear()
        return [self._changes(*keys, cleared=cleared and index == 0) for index, keys in enumerate(portions)]

    def nothing_new(self) -> KvChanges:
        """A message without changes: its number tells a reader whether one before it was lost."""
        return self._changes((), ())

    def repetition(self) -> list[KvChanges]:
        """All that has been published, as a reader takes it who has missed a message."""
        keys_left = iter(self._published)
        portions = [tuple(islice(keys_left, self._most_keys)) for _ in range(self._parts)]
        return [
            KvChanges(self._worker, self._number, stored=pack(keys), part=part, parts=len(portions))
            for part, keys in enumerate(portions)
        ]

    @property
    def _parts(self) -> int:
        return max(-(-len(self._published) // self._most_keys), 1)

    def _stands(self, key: int) -> bool:
        """Whether a reader who knows all messages, and that all is cleared if so, has the key."""
        return not self._cleared and key in self._published

    def _portions(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """What was removed and stored, in portions for one message each."""
        removed, stored = iter(self._removed), iter(self._stored)
        while True:
            gone = tuple(islice(removed, self._most_keys))
            come = tuple(islice(stored, self._most_keys - len(gone)))
            if not gone and not come:
                return
            yield gone, come

    def _changes(self, removed: tuple[int, ...], stored: tuple[int, ...], *, cleared: bool = False) -> KvChanges:
        self._number += 1
        return KvChanges(self._worker, self._number, pack(removed), pack(stored), cleared)
