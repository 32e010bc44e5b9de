"""Pulls KV from other workers: asks the source to pin the blocks that this engine lacks, and unpins them once read.

A failure costs time, never a request: blocks that are not pulled are computed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeVar
from uuid import uuid4

import msgspec

from dynamo_local.core.codec import Message
from dynamo_local.core.errors import BusError, DecodeError, EngineError
from dynamo_local.core.messages.kv import ConfirmAnswer, ConfirmQuestion, PinAnswer, PinQuestion, Unpin
from dynamo_local.core.messages.work import RequestEpoch, Submit
from dynamo_local.core.ports import Engine, Prefix, PulledPrefix
from dynamo_local.process.context import ServiceContext
from state.machine.identity import machine_id

_log = logging.getLogger(__name__)

_Reply = TypeVar("_Reply", bound=Message)

PIN_S = 20.0
"""How long blocks are asked to be pinned. Blocks not read by then are computed."""

_ANSWER_S = 5.0
"""Deadline of the source's answer, which waits for the engine steps under way there."""

_AVOIDED_S = 60.0
"""How long nothing is pulled from a worker on another machine after a read that failed, or did not end in time: what
keeps them apart (a firewall, say) lasts, and each request would wait for it, up to `PIN_S`."""

_MAX_BLOCKS = 16_384
"""Blocks pulled for one request at most: more than half a million tokens."""


class KvPuller:
    """Pins at other workers for the requests of one engine."""

    def __init__(self, context: ServiceContext, engine: Engine, *, answer_s: float = _ANSWER_S) -> None:
        self._context = context
        self._engine = engine
        self._answer_s = answer_s
        self._asking: dict[asyncio.Future[Any], str] = {}
        """Questions without an answer yet, each with its source."""
        self._pins: dict[RequestEpoch, tuple[str, str]] = {}
        """(source, pin) of each request whose blocks are being read."""
        self._unsettled: set[str] = set()
        """Pins of sources on other machines whose reads do not count yet."""
        self._avoided: dict[str, float] = {}
        """Workers that nothing is pulled from, each with the end of that."""

    async def pull(self, work: Submit, source: str) -> PulledPrefix | None:
        """Have `source` pin the prefix of this request until `done`. None if nothing can be pulled. Never raises."""
        if time.monotonic() < self._avoided.get(source, 0.0):
            return None
        try:
            prefix = self._engine.prefix(work.token_ids, work.cache_salt, work.adapter)
            if prefix is None or not prefix.hashes:
                return None
            return await self._ask(RequestEpoch(work.request_id, work.epoch), source, prefix)
        except (BusError, DecodeError, EngineError) as error:
            _log.warning("the prefix of request %s is computed, not pulled: %s", work.request_id, error)
        except Exception:  # noqa: BLE001
            # The boundary of a pull, which no request depends on.
            _log.exception("the prefix of request %s is computed, not pulled", work.request_id)
        return None

    async def _ask(self, request: RequestEpoch, source: str, prefix: Prefix) -> PulledPrefix | None:
        hashes = prefix.hashes[:_MAX_BLOCKS]
        pin = uuid4().hex
        pulled: PulledPrefix | None = None
        until = time.monotonic() + PIN_S
        question = PinQuestion(pin, prefix.fingerprint, hashes, PIN_S, prefix.rest, machine_id(), self._network)
        try:
            # Concurrently: each of the two engines answers only when its step under way has ended.
            answer, cached = await asyncio.gather(
                self._ask_source(source, self._context.subjects.pin(source), question, PinAnswer),
                self._engine.cached(prefix),
            )
            pin = answer.pin or pin
            refused = answer.refused or _why_unusable(question, answer)
            if refused is not None:
                _log.warning(
                    "worker %s lends no KV to request %s, whose prefix is computed: %s", source, request, refused
                )
            elif answer.blocks > cached:
                pulled = PulledPrefix(pin, hashes, answer, cached, len(prefix.rest))
                self._pins[request] = (source, pin)
                if answer.machine != question.machine:
                    pulled = self._confirmed_later(source, pulled, until)
        finally:
            if pulled is None:
                # Also without an answer: if only that was lost, the source has pinned the blocks.
                await self._unpin(source, pin)
        return pulled

    def _confirmed_later(self, source: str, pulled: PulledPrefix, until: float) -> PulledPrefix:
        """Have the source confirm the pin once everything has been read. Returns the same prefix, to be confirmed."""
        self._unsettled.add(pulled.pin)
        self._context.tasks.spawn(f"confirm {pulled.pin}", self._confirm(source, pulled.pin))
        # The reader gives up by its own clock: it says nothing of the source's.
        answer = msgspec.structs.replace(pulled.answer, until=until)
        return replace(pulled, answer=answer, to_confirm=True)

    async def _confirm(self, source: str, pin: str) -> None:
        """Once everything has been read, ask the source whether the pin was held until then. Never raises."""
        held = False
        try:
            if await self._engine.read_ended(pin):
                held = await self._held(source, pin)
            elif pin in self._unsettled:
                self._avoid(source)
        except (BusError, DecodeError, EngineError) as error:
            _log.warning("worker %s did not confirm that it held its KV, which is computed: %s", source, error)
        except Exception:  # noqa: BLE001
            # The boundary of a pull, which no request depends on.
            _log.exception("it cannot be confirmed that worker %s held its KV, which is computed", source)
        # Not when cancelled: this process ends then, and its engine may not answer any more.
        await self._settle(pin, held=held)

    async def _held(self, source: str, pin: str) -> bool:
        subject = self._context.subjects.confirm(source)
        held = (await self._ask_source(source, subject, ConfirmQuestion(pin), ConfirmAnswer)).held
        if not held:
            _log.warning("worker %s did not hold its KV until it was read: it is computed", source)
        return held

    def _avoid(self, source: str) -> None:
        now = time.monotonic()
        self._avoided = {other: until for other, until in self._avoided.items() if until > now}
        self._avoided[source] = now + _AVOIDED_S
        _log.warning(
            "the KV of worker %s could not be read: for %g s it is computed. Does its address in the network for KV "
            "let this machine connect?",
            source,
            _AVOIDED_S,
        )

    async def _settle(self, pin: str, *, held: bool) -> None:
        self._unsettled.discard(pin)
        try:
            await self._engine.settle_read(pin, held=held)
        except EngineError as error:
            _log.warning("the engine was not told whether pin %s was held: %s", pin, error)

    @property
    def _network(self) -> str:
        """How this engine reads KV of other machines: its closed network, or TLS_STREAM."""
        engine = self._context.announcer.presence.engine
        return "" if engine is None else engine.kv_network

    async def _ask_source(self, source: str, subject: str, question: Message, reply: type[_Reply]) -> _Reply:
        """Ask, until the source is gone. Raises BusError and DecodeError."""
        asking = asyncio.ensure_future(self._context.bus.ask(subject, question, reply, timeout_s=self._answer_s))
        self._asking[asking] = source
        try:
            await asyncio.wait((asking,))
        finally:
            del self._asking[asking]
            asking.cancel()
        if asking.cancelled():
            raise BusError(f"worker {source} is gone")
        return asking.result()

    def lost(self, source: str) -> None:
        """The source is gone: fail the questions that wait for it."""
        for asking in [asking for asking, asked in self._asking.items() if asked == source]:
            asking.cancel()

    async def done(self, requests: Iterable[RequestEpoch]) -> None:
        """Unpin the blocks of requests that have read them or do not need them. Others are ignored."""
        for request in requests:
            if (pinned := self._pins.pop(request, None)) is None:
                continue
            if pinned[1] in self._unsettled:
                # Not awaited: the engine answers between two steps, and tokens are not to wait for that.
                self._context.tasks.spawn(f"settle {pinned[1]}", self._settle(pinned[1], held=False))
            await self._unpin(*pinned)

    async def _unpin(self, source: str, pin: str) -> None:
        try:
            await self._context.bus.send(self._context.subjects.work(source), Unpin((pin,)))
        except BusError as error:
            _log.warning(
                "worker %s was not told that its KV has been read, and keeps it until the pin expires: %s",
                source,
                error,
            )


def _why_unusable(question: PinQuestion, answer: PinAnswer) -> str | None:
    """Why what the source has pinned is not to be read; None if it is."""
    if answer.blocks <= 0 or (answer.machine and answer.machine == question.machine):
        return None
    if not question.network:
        return "it is of another machine, whose clock says nothing here"
    return None if answer.machine and answer.pin else "it cannot be asked whether it has held the blocks"
