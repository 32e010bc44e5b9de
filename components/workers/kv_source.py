"""Answering what others ask of this worker's KV cache: how much of a prompt is there, and to keep blocks for them."""

from __future__ import annotations

import logging

from dynamo_local.bus.nats import Message
from dynamo_local.core import codec
from dynamo_local.core.errors import BusError, DecodeError, EngineError
from dynamo_local.core.messages.kv import CachedAnswer, CachedQuestion, PinAnswer, PinQuestion
from dynamo_local.core.ports import Engine
from dynamo_local.process.context import ServiceContext

_log = logging.getLogger(__name__)


class KvSource:
    """Joins one engine's cache to the bus. Pins end by `Unpin`, which is part of a worker's work, or by themselves."""

    def __init__(self, context: ServiceContext, engine: Engine) -> None:
        self._context = context
        self._engine = engine

    async def start(self) -> None:
        """Answer from now on."""
        context = self._context
        await context.bus.subscribe(context.subjects.cached(context.lease), self._on_cached)
        await context.bus.subscribe(context.subjects.pin(context.lease), self._on_pin)

    async def _on_cached(self, message: Message) -> None:
        try:
            question = codec.decode(message.data, CachedQuestion)
            prefix = self._engine.prefix(question.token_ids, question.cache_salt, question.adapter)
            cached = 0 if prefix is None else await self._engine.cached(prefix)
        except (DecodeError, EngineError) as error:
            _log.warning("what is cached is not told: %s", error)
            return
        answer = CachedAnswer(cached * self._block_size())
        await self._context.bus.publish(message.reply, codec.encode(answer))

    async def _on_pin(self, message: Message) -> None:
        try:
            question = codec.decode(message.data, PinQuestion)
        except DecodeError as error:
            _log.warning("nothing is kept for a reader: %s", error)
            return
        # Not awaited: the answer waits for steps under way, and other readers are not to wait for it.
        self._context.tasks.spawn(f"pin {question.pin}", self._pin(question, message.reply))

    async def _pin(self, question: PinQuestion, reply: str) -> None:
        try:
            answer = await self._engine.pin(question)
        except EngineError as error:
            answer = PinAnswer(0, refused=str(error))
        except Exception:  # noqa: BLE001
            # The boundary of a question: whatever is wrong with it, this process has others to answer.
            _log.exception("no blocks can be kept for %s", question.pin)
            answer = PinAnswer(0, refused="the engine could not keep the blocks")
        try:
            await self._context.bus.publish(reply, codec.encode(answer))
        except BusError as error:
            # The reader gives up waiting, and unpins.
            _log.warning("a reader is not told of its blocks: %s", error)

    def _block_size(self) -> int:
        engine = self._context.announcer.presence.engine
        return 0 if engine is None else engine.block_size
