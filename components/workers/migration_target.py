"""The destination's side of migrations: reserves room for requests, and brings their KV into the cache beforehand.

The KV comes by a *warm request*: the context so far as a prompt, for one token that is thrown away. It pulls the full
blocks from the worker that the request still runs on (the source), computes the rest, and its blocks are held when it
has finished. A later warm request, and in the end the request itself, grow from these blocks: only the tokens that have
come since are computed. Warm requests belong to the worker: frontends do not hear of them, and they are not counted in
the load that the worker announces.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

import msgspec

from components.workers.kv_puller import KvPuller
from components.workers.requests.epoch_events import EpochEvents
from dynamo_local.bus.subscriptions import Answer
from dynamo_local.core.errors import EngineError, RequestError
from dynamo_local.core.fleet.freeness import Usage, freeness, instance_of
from dynamo_local.core.messages.migration import CancelReservation, MigrationAnswer, MigrationRequest, Reserve, Warm
from dynamo_local.core.messages.presence import Load
from dynamo_local.core.messages.work import RequestEpoch, Submit
from dynamo_local.core.migration.reservations import Reservations, Warmed
from dynamo_local.core.ports import Engine, PulledPrefix
from dynamo_local.process.context import ServiceContext

_log = logging.getLogger(__name__)

MAX_WARMING = 8
"""Warm requests computed at the same time."""

MAX_RESERVATION_S = 120.0
"""Longest time for which room is reserved, whatever a frontend asks for: it may die without cancelling."""

_MAX_COMPUTED_BLOCKS = 2
"""Full blocks computed for a warm request. A request with more that cannot be pulled is better left at the source."""

_SET_APART = "the worker is set apart for one request"

_ONE_TOKEN = msgspec.Raw(msgspec.msgpack.encode({"max_tokens": 1, "temperature": 0.0}))


class MigrationTarget:
    """The destination's side on one worker. `running` returns its number of unfinished requests, `is_parked` whether it
    is parked."""

    def __init__(
        self,
        context: ServiceContext,
        engine: Engine,
        puller: KvPuller,
        watches: EpochEvents,
        running: Callable[[], int],
        is_parked: Callable[[], bool] = lambda: False,
    ) -> None:
        self._context = context
        self._engine = engine
        self._kv_puller = puller
        self._epoch_events = watches
        self._running = running
        self._is_parked = is_parked
        self._reservations = Reservations()
        self._warmed = 0
        """Number of warm requests so far; the epoch of the last one."""
        self._warming = 0
        """Orders to warm that are being carried out."""
        self._in_engine: set[RequestEpoch] = set()
        """Warm requests that the engine runs."""
        self._closed = False

    async def start(self) -> None:
        """Begin to answer frontends."""
        subject = self._context.subjects.migrations(self._context.lease)
        await self._context.bus.serve(subject, MigrationRequest, self._on_request)

    def is_warming(self) -> bool:
        """Whether the engine runs warm requests."""
        return bool(self._in_engine)

    def is_expecting(self) -> bool:
        """Whether room is reserved, or KV is being brought here."""
        return self._warming > 0 or len(self._reservations) > 0

    def close(self) -> None:
        """Reserve no more room: the worker drains."""
        self._closed = True

    def arrived(self, work: Submit) -> RequestEpoch | None:
        """Note that a request has been submitted. Returns the warm request that it can grow from, if there is one."""
        self._reservations.arrive(work.request_id)
        warmed = self._reservations.warmed(work.request_id, work.token_ids, work.cache_salt, work.adapter)
        return None if warmed is None else warmed.request

    async def begun(self, requests: Iterable[RequestEpoch]) -> None:
        """First tokens arrived: release the KV held for these requests. Requests without a reservation are ignored."""
        for request in requests:
            if self._reservations.expects(request.request_id):
                await self._cancel(self._reservations.leave(request.request_id))

    async def expire(self, now: float) -> None:
        """Cancel the reservations whose time is over."""
        await self._cancel(self._reservations.expire(now))

    def has_reservations_of(self, frontend: str) -> bool:
        return bool(self._reservations.of_frontend(frontend))

    async def forget_frontend(self, frontend: str) -> None:
        """Cancel the reservations of a frontend that is gone."""
        for request_id in self._reservations.of_frontend(frontend):
            await self._cancel(self._reservations.leave(request_id))

    def without_warm_requests(self, load: Load) -> Load:
        """The load of the engine less its warm requests."""
        if not self._in_engine or load.running is None or load.waiting is None:
            return load
        # Which of the two they count for is not known; most of their time they wait for blocks to be read.
        warm = len(self._in_engine)
        waiting = max(load.waiting - warm, 0)
        running = max(load.running - (warm - (load.waiting - waiting)), 0)
        return msgspec.structs.replace(load, running=running, waiting=waiting)

    async def _on_request(self, request: MigrationRequest, answer: Answer) -> None:
        match request:
            case Reserve():
                await answer.send(MigrationAnswer(self._reserve(request)))
            case Warm():
                # Not awaited: other requests are not to wait for the steps of this one.
                self._context.tasks.spawn(f"warm {request.request_id}", self._warm_and_answer(request, answer))
            case CancelReservation():
                await self._cancel(self._reservations.leave(request.request_id))

    def _reserve(self, request: Reserve) -> str | None:
        """Reserve room. Returns why this is refused, or None."""
        if self._closed:
            return "the worker is draining"
        if self._is_parked():
            return "the worker is parked"
        presence = self._context.announcer.presence
        if presence.exclusive is not None:
            return _SET_APART
        engine, load, running = presence.engine, presence.load, self._running()
        if engine is None or load is None or load.kv_usage is None:
            return "the load of the worker is not known yet"
        if request.floor is not None and not self._stays_free(request.tokens, request.floor):
            return "the worker would be too full"
        # Engines without KV transfer report no pins.
        used = load.kv_usage + (load.kv_pinned or 0.0)
        return self._reservations.reserve(
            request.request_id,
            request.frontend,
            blocks=-(-(request.tokens + 1) // engine.block_size),
            until=min(request.until, time.monotonic() + MAX_RESERVATION_S),
            free_slots=engine.max_num_seqs - running,
            free_blocks=int(engine.kv_blocks * (1 - used)),
        )

    def _stays_free(self, tokens: int, floor: float) -> bool:
        """Whether the worker's freeness, in steps, is at least `floor` with all reservations and `tokens` more."""
        presence, reservations = self._context.announcer.presence, self._reservations
        assert presence.engine is not None, "checked by the caller"
        taken = reservations.awaited_blocks * presence.engine.block_size + tokens
        instance = instance_of(presence, time.monotonic(), Usage(taken, requests=reservations.awaited + 1))
        return instance is not None and freeness(instance) >= floor

    async def _warm_and_answer(self, request: Warm, answer: Answer) -> None:
        self._warming += 1
        try:
            outcome = await self._warm(request)
        except Exception:  # noqa: BLE001
            # The boundary of a warm request, which no request depends on.
            _log.exception("the warm request of %s failed", request.request_id)
            outcome = MigrationAnswer("the warm request failed")
        finally:
            self._warming -= 1
        await answer.send(outcome)

    async def _warm(self, request: Warm) -> MigrationAnswer:
        if not self._reservations.expects(request.request_id):
            return MigrationAnswer("there is no reservation for the request")
        if self._warming > MAX_WARMING:
            return MigrationAnswer("too many warm requests are running there")
        if self._context.announcer.presence.exclusive is not None:
            return MigrationAnswer(_SET_APART)
        self._warmed += 1
        work = Submit(
            f"warm {request.request_id}",
            self._warmed,
            frontend="",
            token_ids=request.token_ids,
            sampling=_ONE_TOKEN,
            priority=request.priority,
            key=request.key,
            cache_salt=request.cache_salt,
            adapter=request.adapter,
            hold_s=max(self._reservations.until(request.request_id) - time.monotonic(), 0.0),
        )
        warm = RequestEpoch(work.request_id, work.epoch)
        outcome = await self._compute(request, work, warm)
        if outcome.refused is not None:
            await self._cancel([warm])
        else:
            warmed = Warmed(warm, request.token_ids, request.cache_salt, request.adapter)
            await self._cancel(self._reservations.hold(request.request_id, warmed))
        return outcome

    async def _compute(self, request: Warm, work: Submit, warm: RequestEpoch) -> MigrationAnswer:
        """Run the warm request in the engine, until it has finished."""
        events = self._epoch_events.add(warm)
        try:
            outcome = await self._submit(request, work, warm)
            if outcome.refused is None:
                async with asyncio.timeout(request.until - time.monotonic()):
                    await events.computed.wait()
        except (RequestError, EngineError) as error:
            return MigrationAnswer(str(error))
        except TimeoutError:
            return MigrationAnswer("the worker is too busy")
        else:
            return outcome
        finally:
            self._in_engine.discard(warm)
            self._epoch_events.forgotten([warm])
            await self._kv_puller.done([warm])

    async def _submit(self, request: Warm, work: Submit, warm: RequestEpoch) -> MigrationAnswer:
        """Submit the warm request to the engine, unless too much of it would have to be computed here."""
        earlier = self._reservations.warmed(request.request_id, work.token_ids, work.cache_salt, work.adapter)
        if earlier is not None and len(work.token_ids) - len(earlier.token_ids) <= self._max_computed_tokens():
            self._in_engine.add(warm)
            if await self._engine.grow(work, earlier.request, warm=True):
                return MigrationAnswer()
            self._in_engine.discard(warm)
        pulled = await self._kv_puller.pull(work, request.source)
        refused = await self._refusal(work, pulled)
        if refused is not None:
            return MigrationAnswer(refused)
        self._in_engine.add(warm)
        await self._engine.warm(work, pulled)
        return self._pulled(pulled)

    async def _refusal(self, work: Submit, pulled: PulledPrefix | None) -> str | None:
        """Why the warm request is not run, or None: too much of its context would have to be computed here."""
        if pulled is not None:
            lacking = len(pulled.hashes) - pulled.answer.blocks
        else:
            prefix = self._engine.prefix(work.token_ids, work.cache_salt, work.adapter)
            if prefix is None:
                return "the engine cannot pull KV"
            lacking = len(prefix.hashes) - await self._engine.cached(prefix)
        return "too little of its KV can be pulled from the source" if lacking > _MAX_COMPUTED_BLOCKS else None

    def _max_computed_tokens(self) -> int:
        engine = self._context.announcer.presence.engine
        return 0 if engine is None else _MAX_COMPUTED_BLOCKS * engine.block_size

    def _pulled(self, pulled: PulledPrefix | None) -> MigrationAnswer:
        engine = self._context.announcer.presence.engine
        if pulled is None or engine is None:
            return MigrationAnswer()
        blocks, rest, size = pulled.answer.blocks - pulled.cached, pulled.answer.rest, engine.block_bytes
        tokens = blocks * engine.block_size + rest
        return MigrationAnswer(None, tokens, None if size is None else (blocks + (rest > 0)) * size)

    async def _cancel(self, warm: list[RequestEpoch]) -> None:
        """Cancel warm requests in the engine, and release the KV held for them."""
        if warm:
            await self._engine.cancel(warm)
