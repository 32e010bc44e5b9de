"""Which workers hold which blocks: a table from a block's key to a set of workers. Pure.

A set of workers is an integer with a bit for each. Most blocks have one holder, and the integers of single workers are
shared, so that a block costs an entry of a dict and its key: 130 bytes at most, however many workers there are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from itertools import groupby, repeat


class WorkerBits:
    """Numbers workers. A number that is free is given again."""

    def __init__(self) -> None:
        self._bits: dict[str, int] = {}
        self._workers: dict[int, str] = {}

    def bit(self, worker: str) -> int:
        """The integer with the worker's bit alone. Gives the worker one if it has none."""
        known = self._bits.get(worker)
        if known is not None:
            return known
        taken = sum(self._workers)
        free = ~taken & (taken + 1)
        self._bits[worker] = free
        self._workers[free] = worker
        return free

    def known(self, worker: str) -> int:
        """The integer with the worker's bit; 0 if it has none."""
        return self._bits.get(worker, 0)

    def free(self, worker: str) -> None:
        """Take the worker's bit away. No table may contain it any more."""
        bit = self._bits.pop(worker, None)
        if bit is not None:
            del self._workers[bit]

    def workers(self, bits: int) -> Iterator[str]:
        """The workers in a set."""
        while bits:
            lowest = bits & -bits
            yield self._workers[lowest]
            bits ^= lowest


class HolderTable:
    """The holders of each block. Blocks without a holder are not in it; it has `most` blocks at most."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._holders: dict[int, int] = {}
        self.get = self._holders.get

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, bit: int, keys: Collection[int]) -> int:
        """Add a holder to different blocks. Returns to how many it is new. Blocks beyond `most` are left out."""
        holders, new = self._holders, 0
        for before, some in self._runs(keys):
            if before & bit:
                continue
            room = len(some) if before else self._most - len(holders)
            holders.update(dict.fromkeys(some[:room], before | bit))
            new += min(len(some), room)
        return new

    def remove(self, bit: int, keys: Collection[int]) -> int:
        """Remove a holder from different blocks. Returns from how many it was removed; others are ignored."""
        holders, gone = self._holders, 0
        for before, some in self._runs(keys):
            if not before & bit:
                continue
            gone += len(some)
            if before != bit:
                holders.update(dict.fromkeys(some, before ^ bit))
            else:
                deque(map(holders.__delitem__, some), maxlen=0)
        return gone

    def _runs(self, keys: Collection[int]) -> Iterator[tuple[int, Sequence[int]]]:
        """Blocks in order, together with those that follow and have the same holders. Most prefixes have few such runs,
        however long they are, and what is done for a run at once is done by dict."""
        ordered, start = tuple(keys), 0
        for before, run in groupby(list(map(self.get, ordered, repeat(0)))):
            end = start + len(list(run))
            yield before, ordered[start:end]
            start = end

    def clear(self, bit: int) -> None:
        """Remove a holder from all blocks. Looks at each."""
        self.remove(bit, [key for key, holders in self._holders.items() if holders & bit])
