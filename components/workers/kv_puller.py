"""Pulls KV from other workers: asks the source to pin the blocks that this engine lacks, and unpins them once read.

A failure costs time, never a request: blocks that are not pulled are computed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from uuid import uuid4

from dynamo_local.core.errors import BusError, DecodeError, EngineError
from dynamo_local.core.messages.kv import PinAnswer, PinQuestion, Unpin
from dynamo_local.core.messages.work import RequestEpoch, Submit
from dynamo_local.core.ports import Engine, Prefix, PulledPrefix
from dynamo_local.process.context import ServiceContext
from state.machine.identity import machine_id

_log = logging.getLogger(__name__)

PIN_S = 20.0
"""How long blocks are asked to be pinned. Blocks not read by then are computed."""

_ANSWER_S = 5.0
"""Deadline of the source's answer, which waits for the engine steps under way there."""

_MAX_BLOCKS = 16_384
"""Blocks pulled for one request at most: more than half a million tokens."""


class KvPuller:
    """Pins at other workers for the requests of one engine."""

    def __init__(self, context: ServiceContext, engine: Engine, *, answer_s: float = _ANSWER_S) -> None:
        self._context = context
        self._engine = engine
        self._answer_s = answer_s
        self._asking: dict[asyncio.Future[PinAnswer], str] = {}
        """Pin requests without an answer yet, each with its source."""
        self._pins: dict[RequestEpoch, tuple[str, str]] = {}
        """(source, pin) of each request whose blocks are being read."""

    async def pull(self, work: Submit, source: str) -> PulledPrefix | None:
        """Have `source` pin the prefix of this request until `done`. None if nothing can be pulled. Never raises."""
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
        question = PinQuestion(pin, prefix.fingerprint, hashes, PIN_S, prefix.rest, machine_id())
        try:
            # Concurrently: each of the two engines answers only when its step under way has ended.
            answer, cached = await asyncio.gather(self._pinned(source, question), self._engine.cached(prefix))
            refused = answer.refused
            if answer.blocks > 0 and answer.machine != question.machine:
                refused = "it is of another machine, whose clock says nothing here"
            if refused is not None:
                _log.warning(
                    "worker %s lends no KV to request %s, whose prefix is computed: %s", source, request, refused
                )
            elif answer.blocks > cached:
                pulled = PulledPrefix(pin, hashes, answer, cached, len(prefix.rest))
                self._pins[request] = (source, pin)
        finally:
            if pulled is None:
                # Also without an answer: if only that was lost, the source has pinned the blocks.
                await self._unpin(source, pin)
        return pulled

    async def _pinned(self, source: str, question: PinQuestion) -> PinAnswer:
        subject = self._context.subjects.pin(source)
        asking = asyncio.ensure_future(self._context.bus.ask(subject, question, PinAnswer, timeout_s=self._answer_s))
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
        """The source is gone: fail the pin requests that wait for it."""
        for asking in [asking for asking, asked in self._asking.items() if asked == source]:
            asking.cancel()

    async def done(self, requests: Iterable[RequestEpoch]) -> None:
        """Unpin the blocks of requests that have read them or do not need them. Others are ignored."""
        for request in requests:
            if (pinned := self._pins.pop(request, None)) is not None:
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
