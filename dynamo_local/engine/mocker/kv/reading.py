"""The destination's end of pulls: reads that take the modelled time, one after another, and what came of them."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from dynamo_local.core.errors import EngineError
from dynamo_local.engine.kv.confirmations import Confirmations
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
    between two steps. One that is to be confirmed waits for that then."""

    def __init__(self, settings: MockerSettings, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._scheduler = scheduler
        self._clock = clock
        self._due: deque[_Due] = deque()
        self._confirmations = Confirmations(1)
        self._withheld: dict[str, Read] = {}
        """Reads that have ended and are to be confirmed, by pin."""
        self._refused: set[str] = set()
        """Pins of reads under way that are known not to count."""

    @property
    def next_end(self) -> float:
        """Time at which the next read is over. Infinite without reads."""
        withheld = min((read.pull.until for read in self._withheld.values()), default=math.inf)
        return min(self._due[0].at if self._due else math.inf, withheld)

    def start(self, reads: Iterable[Read], now: float) -> None:
        """Begin these reads. They share one line: each waits for those before it."""
        for read in reads:
            free_at = self._due[-1].at if self._due else now
            self._due.append(_Due(max(now, free_at) + self._settings.transfer_s(len(read.targets)), read))
            if pin := read.pull.confirm:
                self._confirmations.begin(pin, pin, read.pull.until)

    def end(self, now: float) -> bool:
        """Finish the reads whose time is over. Returns whether there were any."""
        ended = self._end_confirmed(now)
        while self._due and self._due[0].at <= now:
            read = self._due.popleft().read
            ended |= self._end(read)
        return ended

    async def ended(self, pin: str) -> bool:
        """Wait until the read under this pin has ended; False if it is settled first."""
        return await asyncio.wrap_future(self._confirmations.ended(pin))

    def settle(self, pin: str, *, held: bool) -> bool:
        """Note whether the source has confirmed. Returns whether a read waits for that."""
        self._confirmations.settle(pin, held)
        return pin in self._withheld

    def _end(self, read: Read) -> bool:
        """Have what was read count, if it does already. Returns whether anybody waits for it."""
        pin = read.pull.confirm
        # The blocks of one that was cancelled meanwhile are somebody else's by now.
        wanted = self._scheduler.is_loading(read.sequence)
        received = wanted and pin not in self._refused and self._receive(read)
        if pin and received:
            self._withheld[pin] = read
            self._confirmations.note({pin: 1})
            return False
        if pin:
            self._refused.discard(pin)
            self._confirmations.forget(pin)
        if wanted:
            self._scheduler.end_read(read, received)
        return wanted

    def _end_confirmed(self, now: float) -> bool:
        self._confirmations.expire(now)
        ended = False
        for pin, held in self._confirmations.take().items():
            read = self._withheld.pop(pin, None)
            if read is None:
                self._refused.add(pin)
                continue
            self._confirmations.forget(pin)
            if self._scheduler.is_loading(read.sequence):
                self._scheduler.end_read(read, held)
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
