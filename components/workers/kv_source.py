"""Answers questions about this worker's KV cache: how much of a prompt is cached, and pinning blocks for a reader."""

from __future__ import annotations

import logging
from collections.abc import Callable

from dynamo_local.bus.subscriptions import Answer
from dynamo_local.core.errors import EngineError
from dynamo_local.core.messages.kv import CachedAnswer, CachedQuestion, PinAnswer, PinQuestion
from dynamo_local.core.ports import Engine
from dynamo_local.process.context import ServiceContext

_log = logging.getLogger(__name__)


class KvSource:
    """Serves one engine's KV cache. A pin ends by `Unpin` (engine_service.py), or when its time is over.

    `is_parked`: whether the engine is not to be asked, and has nothing cached.
    """

    def __init__(self, context: ServiceContext, engine: Engine, is_parked: Callable[[], bool]) -> None:
        self._context = context
        self._engine = engine
        self._is_parked = is_parked

    async def start(self) -> None:
        """Begin to answer."""
        context = self._context
        await context.bus.serve(context.subjects.cached(context.lease), CachedQuestion, self._on_cached)
        await context.bus.serve(context.subjects.pin(context.lease), PinQuestion, self._on_pin)

    async def _on_cached(self, question: CachedQuestion, answer: Answer) -> None:
        try:
            prefix = self._engine.prefix(question.token_ids, question.cache_salt, question.adapter)
            cached = 0 if prefix is None or self._is_parked() else await self._engine.cached(prefix)
        except EngineError as error:
            _log.warning("a question about cached tokens is not answered: %s", error)
            return
        await answer.send(CachedAnswer(cached * self._block_size()))

    async def _on_pin(self, question: PinQuestion, answer: Answer) -> None:
        if self._is_parked():
            await answer.send(PinAnswer(0, refused="nothing is cached there: the worker is parked"))
            return
        # Not awaited: a pin waits for the engine steps under way, and other readers are not to wait for it.
        self._context.tasks.spawn(f"pin {question.pin}", self._pin(question, answer))

    async def _pin(self, question: PinQuestion, answer: Answer) -> None:
        try:
            pinned = await self._engine.pin(question)
        except EngineError as error:
            pinned = PinAnswer(0, refused=str(error))
        except Exception:  # noqa: BLE001
            # The boundary of a pin request: an error in one must not end the process.
            _log.exception("blocks could not be pinned for %s", question.pin)
            pinned = PinAnswer(0, refused="the engine could not pin the blocks")
        await answer.send(pinned)

    def _block_size(self) -> int:
        engine = self._context.announcer.presence.engine
        return 0 if engine is None else engine.block_size
