"""Answers questions about this worker's KV cache: how much of a prompt is cached, and pinning blocks for a reader."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from dynamo_local.bus.subscriptions import Answer
from dynamo_local.core.errors import EngineError
from dynamo_local.core.messages.kv import CachedAnswer, CachedQuestion, PinAnswer, PinQuestion
from dynamo_local.core.ports import Engine
from dynamo_local.process.context import ServiceContext
from state.machine.identity import machine_id

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
        if (refused := _refused(question.machine)) is not None:
            await answer.send(PinAnswer(0, refused=refused))
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
        await answer.send(msgspec.structs.replace(pinned, machine=question.machine))

    def _block_size(self) -> int:
        engine = self._context.announcer.presence.engine
        return 0 if engine is None else engine.block_size


def _refused(reader: str) -> str | None:
    """Why nothing is pinned for a reader of this machine. Both ends of a read go by one clock: with another, the reader
    would take blocks for its own that the source has reused."""
    if not machine_id():
        return "which machine it is on cannot be told: /proc/sys/kernel/random/boot_id cannot be read"
    return None if reader == machine_id() else "it is on another machine, and KV is read on one machine alone"
