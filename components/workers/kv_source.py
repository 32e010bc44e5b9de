"""Answers questions about this worker's KV cache: how much of a prompt is cached, and pinning blocks for a reader."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import msgspec

from dynamo_local.core.errors import EngineError
from dynamo_local.core.messages.kv import (
    CachedAnswer,
    CachedQuestion,
    ConfirmAnswer,
    ConfirmQuestion,
    PinAnswer,
    PinQuestion,
)
from dynamo_local.core.ports import Engine
from dynamo_local.process.context import ServiceContext
from state.machine.identity import machine_id

_log = logging.getLogger(__name__)

_MOST_NAMED = 1024
"""Questions of readers on other machines whose pins are found by the name in them. An engine has no more leases."""


class KvSource:
    """Serves one engine's KV cache. A pin ends by `Unpin` (engine_service.py), by being confirmed, or when its time is
    over.

    `is_parked`: whether the engine is not to be asked, and has nothing cached.
    """

    def __init__(self, context: ServiceContext, engine: Engine, is_parked: Callable[[], bool]) -> None:
        self._context = context
        self._engine = engine
        self._is_parked = is_parked
        self._far_pins = 0
        """Pins of readers on other machines so far."""
        self._named: dict[str, list[str]] = {}
        """Names of those pins, by the name in the reader's question. The oldest first."""

    async def unpin(self, pins: Sequence[str]) -> None:
        """End pins before their time. A reader that has had no answer knows the name in its question alone; that of one
        pin stands for all that its question got, if it was delivered more than once."""
        for pin in pins:
            asked = pin if pin in self._named else pin.rpartition(".")[0]
            await self._engine.unpin(self._named.pop(asked, [pin]))

    async def start(self) -> None:
        """Begin to answer."""
        bus, subjects, lease = self._context.bus, self._context.subjects, self._context.lease
        tasks = self._context.tasks
        await bus.serve(subjects.cached(lease), CachedQuestion, self._on_cached)
        # In tasks: a pin waits for the engine steps under way, and other readers are not to wait for it.
        await bus.serve(subjects.pin(lease), PinQuestion, self._on_pin, tasks=tasks)
        await bus.serve(subjects.confirm(lease), ConfirmQuestion, self._on_confirm, tasks=tasks)

    async def _on_cached(self, question: CachedQuestion) -> CachedAnswer | None:
        try:
            prefix = self._engine.prefix(question.token_ids, question.cache_salt, question.adapter)
            cached = 0 if prefix is None or self._is_parked() else await self._engine.cached(prefix)
        except EngineError as error:
            _log.warning("a question about cached tokens is not answered: %s", error)
            return None
        return CachedAnswer(cached * self._block_size())

    async def _on_pin(self, question: PinQuestion) -> PinAnswer:
        if self._is_parked():
            return PinAnswer(0, refused="nothing is cached there: the worker is parked")
        if (refused := self._refusal(question)) is not None:
            return PinAnswer(0, refused=refused)
        if question.machine != machine_id():
            # A name of our own, never given twice: a question that is delivered twice must not revive a pin that ended.
            question = msgspec.structs.replace(question, pin=self._name_for(question.pin))
        return await self._pin(question)

    def _name_for(self, asked: str) -> str:
        self._far_pins += 1
        name = f"{asked}.{self._far_pins}"
        self._named.setdefault(asked, []).append(name)
        if len(self._named) > _MOST_NAMED:
            del self._named[next(iter(self._named))]
        return name

    async def _pin(self, question: PinQuestion) -> PinAnswer:
        try:
            pinned = await self._engine.pin(question)
        except EngineError as error:
            pinned = PinAnswer(0, refused=str(error))
        except Exception:  # noqa: BLE001
            # The boundary of a pin request: an error in one must not end the process.
            _log.exception("blocks could not be pinned for %s", question.pin)
            pinned = PinAnswer(0, refused="the engine could not pin the blocks")
        if question.machine != machine_id():
            # No moment of this machine's clock says anything there.
            pinned = msgspec.structs.replace(pinned, until=0.0, pin=question.pin)
        return msgspec.structs.replace(pinned, machine=machine_id())

    async def _on_confirm(self, question: ConfirmQuestion) -> ConfirmAnswer:
        try:
            held = await self._engine.confirm(question.pin)
        except Exception:  # noqa: BLE001
            # As for pins.
            _log.exception("it cannot be told whether pin %s was held", question.pin)
            held = False
        return ConfirmAnswer(held)

    def _refusal(self, question: PinQuestion) -> str | None:
        """Why nothing is pinned for this reader, if so. On one machine both ends of a read go by one clock. Another
        machine's reader has to confirm, and must read in the same closed network, or on streams as well."""
        if not machine_id():
            return "which machine it is on cannot be told: /proc/sys/kernel/random/boot_id cannot be read"
        if question.machine == machine_id():
            return None
        engine = self._context.announcer.presence.engine
        network = "" if engine is None else engine.kv_network
        if not network or not question.machine:
            return "it is on another machine, and KV is read on one machine alone (--kv-network, --kv-stream)"
        return None if question.network == network else f"the reader does not read KV of other machines by {network}"

    def _block_size(self) -> int:
        engine = self._context.announcer.presence.engine
        return 0 if engine is None else engine.block_size
