"""The destination's end of pulls: reads that take the modelled time, one after another, and what came of them."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from dynamo_local.core.errors import EngineError
from dynamo_local.engine.mocker.kv.memory import BlockMemory, read_remote
from dynamo_local.engine.mocker.outcome import Read
from dynamo_local.engine.mocker.scheduler import Scheduler
from dynamo_local.engine.mocker.settings import MockerSettings

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Due:
    at: float
    read: Read


class Reads:
    """Reads under way. A read brings what stands in the source's blocks when it is noticed to be over, which is
    between two steps."""

    def __init__(self, settings: MockerSettings, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._scheduler = scheduler
        self._clock = clock
        self._due: deque[_Due] = deque()

    @property
    def next_end(self) -> float:
        """Time at which the next read is over. Infinite without reads."""
        return self._due[0].at if self._due else math.inf

    def start(self, reads: Iterable[Read], now: float) -> None:
        """Begin these reads. They share one line: each waits for those before it."""
        for read in reads:
            free_at = self._due[-1].at if self._due else now
            self._due.append(_Due(max(now, free_at) + self._settings.transfer_s(len(read.targets)), read))

    def end(self, now: float) -> bool:
        """Finish the reads whose time is over. Returns whether there were any."""
        ended = False
        while self._due and self._due[0].at <= now:
            read = self._due.popleft().read
            # The blocks of one that was cancelled meanwhile are somebody else's by now.
            if self._scheduler.is_loading(read.sequence):
                self._scheduler.end_read(read, self._receive(read))
                ended = True
        return ended

    def _receive(self, read: Read) -> bool:
        """Copy, and then see whether the source still kept the blocks when that was complete. Nothing but the time
        tells: what is there is taken for what it should be, as keys and values would be."""
        try:
            _copy(read, self._scheduler.memory)
        except EngineError as error:
            _log.info("%d blocks will be computed instead of read: %s", len(read.targets), error)
            return False
        late_s = self._clock() - read.pull.until
        if late_s >= 0:
            _log.info("%d blocks will be computed: they were read %.3f s too late", len(read.targets), late_s)
        return late_s < 0


def _copy(read: Read, memory: BlockMemory) -> None:
    for block, content in zip(read.targets, read_remote(Path(read.pull.path), read.sources), strict=True):
        memory.write(block, content)
