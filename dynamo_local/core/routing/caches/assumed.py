"""What is assumed of workers that do not tell which blocks they have: those of the requests assigned to them. Pure.

A worker is taken for a cache of its size that drops what has been used least recently. That overestimates: requests use
blocks for their output as well, and some fail. An overestimate costs a request that is computed where it might have
been cached, and nothing more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from dynamo_local.core.routing.caches.index import PrefixIndex


class AssumedCaches:
    """Enters into an index what workers without events are assumed to have cached."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._used: dict[str, OrderedDict[int, None]] = {}
        """The blocks of each worker, the least recently used first."""

    def use(self, worker: str, keys: Sequence[int], room: int) -> None:
        """Note that a request with these blocks has been assigned. `room`: number of blocks that the worker has."""
        used = self._used.setdefault(worker, OrderedDict())
        # The last blocks of a prefix first: they are dropped before those that they depend on.
        for key in reversed(keys):
            used[key] = None
            used.move_to_end(key)
        dropped = [used.popitem(last=False)[0] for _ in range(max(len(used) - max(room, 0), 0))]
        self._index.replace(worker, dropped, [key for key in keys if key in used])

    def forget(self, worker: str) -> None:
        """Drop all that is assumed of a worker. The index is told apart from this."""
        self._used.pop(worker, None)
