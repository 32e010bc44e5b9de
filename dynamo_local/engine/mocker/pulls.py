"""Pulls of KV between mockers: what both ends agree on, the end that keeps blocks, and the end that reads them."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dynamo_local.core.errors import EngineError
from dynamo_local.core.messages.kv import PinAnswer, PinQuestion
from dynamo_local.core.ports import PulledPrefix
from dynamo_local.engine.kv.confirmations import Confirmations
from dynamo_local.engine.kv.leases import Key
from dynamo_local.engine.mocker.blocks import BlockHash, BlockMemory, read_remote
from dynamo_local.engine.mocker.scheduler import Scheduler
from dynamo_local.engine.mocker.sequence import Pull, Read
from dynamo_local.engine.mocker.settings import MockerSettings

# Agreement of the two ends of a pull, and the destination's use of an offer. Pure.


class Handle(msgspec.Struct, frozen=True, array_like=True):
    """`PinAnswer.handle` of this engine: a file, and which of its slots, in the order of the hashes asked for."""

    path: str
    blocks: tuple[int, ...]


_decoder = msgspec.msgpack.Decoder(Handle)


def fingerprint(settings: MockerSettings, model: str) -> str:
    """Engines that have the same can read each other's blocks."""
    return f"mocker 1; {model}; {settings.mocker_block_size} tokens a block; {settings.mocker_vocab_size} token ids"


def plan_pull(pulled: PulledPrefix, hashes: Sequence[BlockHash]) -> Pull | None:
    """Find which part of an offer serves a context whose blocks have these hashes. None: no part."""
    offered = pulled.hashes[: max(pulled.answer.blocks, 0)]
    try:
        handle = _decoder.decode(pulled.answer.handle)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not offered or len(handle.blocks) < len(offered) or offered[0] not in hashes or min(handle.blocks) < 0:
        return None
    start = hashes.index(offered[0])
    wanted = hashes[start : start + len(offered)]
    if tuple(wanted) != offered[: len(wanted)]:
        return None
    return Pull(
        handle.path, handle.blocks[: len(wanted)], start, pulled.answer.until, pulled.pin if pulled.to_confirm else ""
    )


# The source's end of pulls: pins blocks for readers, and answers when they have been written.


class Source:
    """Source of pulls, of one engine. No pin is longer than `longest_s`.

    `changed()` is called for every pin: an idle engine has to notice its end. `written(blocks)` waits until no step
    under way writes one of these; it returns False if that will never be.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        longest_s: float,
        fingerprint: str,
        clock: Callable[[], float],
        changed: Callable[[], None],
        written: Callable[[list[int]], Awaitable[bool]],
    ) -> None:
        self._scheduler = scheduler
        self._longest_s = longest_s
        self._fingerprint = fingerprint
        self._clock = clock
        self._changed = changed
        self._written = written

    async def answer(self, question: PinQuestion) -> PinAnswer:
        """Pin blocks for a reader, as core.ports.Engine.pin says."""
        key, leases, now = Key("pin", question.pin), self._scheduler.leases, self._clock()
        until = now + min(question.keep_s, self._longest_s)
        blocks = self._scheduler.pool.match(question.hashes)
        refused = self._refusal(question, blocks)
        if refused is None:
            refused = leases.take(key, blocks, until)
        if refused is not None:
            return PinAnswer(0, refused=refused)
        self._changed()
        # A block stands under its hash from the moment at which a step that fills it is planned. Pinned now, it
        # stays that block; the cancellation of the request that fills it does not stop the step.
        written = await self._written(blocks)
        path = self._scheduler.memory.path
        if not written or path is None:
            return PinAnswer(0, refused="the source has been closed")
        if key not in leases:
            return PinAnswer(0, refused="unpinned, or over, before the blocks were written")
        handle = msgspec.msgpack.encode(Handle(str(path), tuple(blocks)))
        return PinAnswer(len(blocks), until, msgspec.Raw(handle))

    def _refusal(self, question: PinQuestion, blocks: list[int]) -> str | None:
        if question.fingerprint != self._fingerprint:
            return f"the KV of this engine is of another kind ({self._fingerprint})"
        if self._scheduler.memory.path is None:
            return "the memory of this engine is not shared"
        if not question.keep_s > 0:
            return "the pin is for no time"
        return None if blocks else "none of the blocks is here"


# The destination's end of pulls: reads that take the modelled time, one after another, and what came of them.

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
