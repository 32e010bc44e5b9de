"""Net changes of an engine's cached blocks, from one step to the next."""

from __future__ import annotations

from dynamo_local.core.ports import CacheChanges
from dynamo_local.core.routing.caches.index import KEY_BYTES


class CacheLog:
    """Collects what is stored and removed, by the hashes of blocks, until it is taken.

    Pure. A hash is told of as stored when its first block comes, and as removed when its last one goes.
    """

    def __init__(self) -> None:
        self._cleared = False
        # Dictionaries, for their order: who has to drop keys drops the longest known first.
        self._removed: dict[bytes, None] = {}
        self._stored: dict[bytes, None] = {}

    def stored(self, block_hash: bytes) -> None:
        key = block_hash[:KEY_BYTES]
        if key in self._removed:
            del self._removed[key]
        else:
            self._stored[key] = None

    def removed(self, block_hash: bytes) -> None:
        key = block_hash[:KEY_BYTES]
        if key in self._stored:
            del self._stored[key]
        else:
            self._removed[key] = None

    def cleared(self) -> None:
        """All blocks are forgotten."""
        self._cleared = True
        self._removed.clear()
        self._stored.clear()

    @property
    def is_empty(self) -> bool:
        return not (self._stored or self._removed or self._cleared)

    def take(self) -> CacheChanges | None:
        """The changes since the last call; None if there are none."""
        if self.is_empty:
            return None
        taken = CacheChanges(b"".join(self._removed), b"".join(self._stored), self._cleared)
        self._removed.clear()
        self._stored.clear()
        self._cleared = False
        return taken
