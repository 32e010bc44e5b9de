"""Blocks kept for readers, each set under a name and until a time. Pure: times come as arguments."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from dynamo_local.engine.mocker.kv.blocks import BlockPool


@dataclass(frozen=True)
class _Kept:
    blocks: tuple[int, ...]
    until: float


class Pins:
    """Pins of readers, and holds of finished requests, which are the same to the pool.

    Invariants: a block in here is not taken for anything else; at most `most` different blocks are. A pin ends at
    `until`, not before (unless it is removed): who has read a block by a clock that shows less has read the block.
    """

    def __init__(self, pool: BlockPool, most: int) -> None:
        self._pool = pool
        self._most = most
        self._kept: dict[Hashable, _Kept] = {}

    def __contains__(self, name: Hashable) -> bool:
        return name in self._kept

    @property
    def next_end(self) -> float | None:
        """When the next one ends by itself."""
        return min((kept.until for kept in self._kept.values()), default=None)

    def add(self, name: Hashable, blocks: Sequence[int], until: float) -> bool:
        """Keep cached blocks. False, and nothing is kept, if that were more than may be. The name must be new."""
        assert name not in self._kept, f"{name} is there already"
        more = sum(self._pool.pins(block) == 0 for block in blocks)
        if self._pool.pinned + more > self._most:
            return False
        self._pool.pin(blocks)
        self._kept[name] = _Kept(tuple(blocks), until)
        return True

    def remove(self, name: Hashable) -> bool:
        """End one before its time. Returns whether it was there."""
        kept = self._kept.pop(name, None)
        if kept is None:
            return False
        self._pool.unpin(kept.blocks)
        return True

    def expire(self, now: float) -> bool:
        """End those whose time has come. Returns whether there were any."""
        ended = [name for name, kept in self._kept.items() if kept.until <= now]
        for name in ended:
            self.remove(name)
        return bool(ended)
