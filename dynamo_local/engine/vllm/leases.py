"""Who keeps which KV blocks from being reused, and until when.

Kinds of leases: a **pin** is a reader's, a **hold** is that of a finished request whose blocks somebody may still pin,
and a **stray** is a read of this engine's own into blocks of its own that was given up and has not ended.

Pure: times are arguments, and what a lease does to a block is the pool's business.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

Kind = Literal["pin", "hold", "stray"]

MOST_LEASES = 1024
"""Each pin of the most modest reader costs an entry."""


class Key(NamedTuple):
    """Names a lease."""

    kind: Kind
    name: str


class Pool(Protocol):
    """Counts references to blocks; a block without any may be reused."""

    def refer(self, blocks: Sequence[int]) -> None:
        """One more reference to each."""

    def give_up(self, blocks: Sequence[int]) -> None:
        """One reference less to each. Those last in order are the first to be reused."""


@dataclass
class _Lease:
    blocks: tuple[int, ...]
    until: float


class Leases:
    """The leases on one pool.

    Invariants: a block of a lease has a reference of its own for each lease that names it; a lease ends when it is
    told to, or by `expire` once its time is over, and never before; no more than `most_blocks` different blocks are in
    pins and holds.
    """

    def __init__(self, pool: Pool, most_blocks: int, most_leases: int = MOST_LEASES) -> None:
        self._pool = pool
        self._most_blocks = most_blocks
        self._most_leases = most_leases
        self._leases: dict[Key, _Lease] = {}
        self._references: Counter[int] = Counter()
        self._next = math.inf

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, key: Key) -> bool:
        return key in self._leases

    @property
    def references(self) -> Mapping[int, int]:
        """Every block in a lease, and how many leases it is in."""
        return self._references

    @property
    def next_end(self) -> float:
        """When `expire` has something to do, at the earliest. Infinite without leases."""
        return self._next

    def take(self, key: Key, blocks: Sequence[int], until: float) -> str | None:
        """Start a lease, or say why not."""
        if key in self._leases:
            return "there is such a lease already"
        if len(self._leases) >= self._most_leases:
            return "there are too many leases"
        new = len(set(blocks) - self._references.keys())
        if len(self._references) + new > self._most_blocks:
            return f"{len(self._references)} of at most {self._most_blocks} blocks are kept for readers already"
        self._start(key, blocks, until)
        return None

    def strand(self, name: str, blocks: Sequence[int]) -> None:
        """Keep blocks out of use until `end`: something may still write to them. No limit can forbid that."""
        if Key("stray", name) not in self._leases:
            self._start(Key("stray", name), blocks, math.inf)

    def shrink(self, key: Key, count: int) -> None:
        """Let a lease keep its first `count` blocks only; without any it ends."""
        lease = self._leases[key]
        kept, rest = lease.blocks[:count], lease.blocks[count:]
        if not kept:
            self.end(key)
            return
        lease.blocks = kept
        self._free(rest)

    def blocks(self, key: Key) -> tuple[int, ...]:
        """Of a lease; empty once it has ended."""
        lease = self._leases.get(key)
        return () if lease is None else lease.blocks

    def end(self, key: Key) -> None:
        """End a lease at once. Unknown ones are ignored."""
        lease = self._leases.pop(key, None)
        if lease is not None:
            self._free(lease.blocks)

    def expire(self, now: float) -> None:
        """End the leases whose time is over."""
        if now < self._next:
            return
        for key in [key for key, lease in self._leases.items() if lease.until <= now]:
            self.end(key)
        self._next = min((lease.until for lease in self._leases.values()), default=math.inf)

    def _start(self, key: Key, blocks: Sequence[int], until: float) -> None:
        self._pool.refer(blocks)
        self._leases[key] = _Lease(tuple(blocks), until)
        self._references.update(blocks)
        self._next = min(self._next, until)

    def _free(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._references[block] -= 1
            if not self._references[block]:
                del self._references[block]
        self._pool.give_up(blocks)
