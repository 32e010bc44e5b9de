"""The source's end of pulls: pins blocks for readers, and answers when they have been written."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from dynamo_local.core.messages.kv import PinAnswer, PinQuestion
from dynamo_local.engine.kv.leases import Key
from dynamo_local.engine.mocker.kv.pulling import Handle
from dynamo_local.engine.mocker.scheduler import Scheduler


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
