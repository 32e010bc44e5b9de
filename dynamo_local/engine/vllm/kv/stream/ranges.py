"""The memory that readers of a stream may ask for."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np

from dynamo_local.core.errors import EngineError
from dynamo_local.engine.vllm.kv.memory_agent import Pieces
from dynamo_local.engine.vllm.kv.stream.frames import MOST_BYTES

Range = tuple[int, int]
"""Address and length."""


class Ranges:
    """Memory of this process that does not go away before it is taken out. For several threads."""

    def __init__(self) -> None:
        self._ranges: tuple[Range, ...] = ()
        self._lent = 0
        self._changed = threading.Condition()

    def add(self, ranges: Iterable[Range]) -> None:
        with self._changed:
            self._ranges = (*self._ranges, *ranges)

    def remove(self, ranges: Iterable[Range]) -> None:
        """Lend them to nobody from now on; see `wait`."""
        gone = set(ranges)
        with self._changed:
            self._ranges = tuple(each for each in self._ranges if each not in gone)

    def wait(self, timeout_s: float) -> None:
        """Wait until nothing is lent."""
        with self._changed:
            self._changed.wait_for(lambda: not self._lent, timeout_s)

    @contextmanager
    def lent(self, pieces: Pieces) -> Iterator[int]:
        """The context in which these pieces may be read; how many bytes they are. Raises EngineError, as `check`."""
        with self._changed:
            size = self.check(pieces)
            self._lent += 1
        try:
            yield size
        finally:
            with self._changed:
                self._lent -= 1
                self._changed.notify_all()

    def check(self, pieces: Pieces) -> int:
        """Returns how many bytes these are. Raises EngineError unless each lies within one range."""
        starts, lengths = pieces[:, 0], pieces[:, 1]
        inside = np.zeros(len(pieces), dtype=bool)
        for start, length in self._ranges:
            offsets = starts - np.uint64(start)
            # What begins before the range has a huge offset. No sum can overflow: a length is compared with what is
            # left.
            within = offsets < length
            inside |= within & (lengths > 0) & (lengths <= np.uint64(length) - np.where(within, offsets, np.uint64(0)))
        if not inside.all():
            raise EngineError("a reader asks for memory that is no KV")
        # Each is at most a range, so that their sum is exact in Python alone.
        total: int = sum(lengths.tolist())
        if total > MOST_BYTES:
            raise EngineError(f"a reader asks for {total} bytes at once")
        return total


def memory_of(pieces: Pieces) -> Iterator[memoryview]:
    """The bytes at these addresses of this process."""
    for address, length in pieces.tolist():
        yield memoryview((ctypes.c_char * length).from_address(address)).cast("B")
