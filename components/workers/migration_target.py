"""The destination's side of migrations: reserves room for requests, and brings their KV into the cache beforehand.

The KV comes by a *warm request* (warming.py): the context so far as a prompt. It pulls the full blocks from
the worker that the request still runs on (the source), computes the rest, and its blocks are held when it has finished.
A later warm request, and in the end the request itself, grow from these blocks: only the tokens that have come since
are computed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from components.workers.warming import MAX_COMPUTED_BLOCKS, ONE_TOKEN, WarmOutcome, WarmRequests
from dynamo_local.core.fleet.freeness import Usage, freeness, instance_of
from dynamo_local.core.messages.work import (
    CancelReservation,
    MigrationAnswer,
    MigrationRequest,
    RequestEpoch,
    Reserve,
    Submit,
    Warm,
)
from dynamo_local.core.migration.reservations import Reservations, Warmed
from dynamo_local.core.ports import Engine
from dynamo_local.process.context import ServiceContext

_log = logging.getLogger(__name__)

MAX_WARMING = 8
"""Warm requests computed at the same time."""

MAX_RESERVATION_S = 120.0
"""Longest time for which room is reserved, whatever a frontend asks for: it may die without cancelling."""

_SET_APART = "the worker is set apart for one request"


class MigrationTarget:
    """The destination's side on one worker. `running` returns its number of unfinished requests, `is_parked` whether it
    is parked."""

    def __init__(
        self,
        context: ServiceContext,
        engine: Engine,
        warm_requests: WarmRequests,
        running: Callable[[], int],
        is_parked: Callable[[], bool] = lambda: False,
    ) -> None:
        self._context = context
        self._engine = engine
        self._warm_requests = warm_requests
        self._running = running
        self._is_parked = is_parked
        self._reservations = Reservations()
        self._warmed = 0
        """Number of warm requests so far; the epoch of the last one."""
        self._warming = 0
        """Orders to warm that are being carried out."""
        self._closed = False

    async def start(self) -> None:
        """Begin to answer frontends."""
        subject = self._context.subjects.migrations(self._context.lease)
        # In tasks: other requests are not to wait for the steps of one that warms.
        await self._context.bus.serve(subject, MigrationRequest, self._on_request, tasks=self._context.tasks)

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

    async def _on_request(self, request: MigrationRequest) -> MigrationAnswer | None:
        match request:
            case Reserve():
                return MigrationAnswer(self._reserve(request))
            case Warm():
                return await self._warm_or_refuse(request)
            case CancelReservation():
                await self._cancel(self._reservations.leave(request.request_id))
                return None

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
            until=time.monotonic() + min(request.keep_s, MAX_RESERVATION_S),
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

    async def _warm_or_refuse(self, request: Warm) -> MigrationAnswer:
        self._warming += 1
        try:
            outcome = await self._warm(request)
        except Exception:  # noqa: BLE001
            # The boundary of a warm request, which no request depends on.
            _log.exception("the warm request of %s failed", request.request_id)
            outcome = MigrationAnswer("the warm request failed")
        finally:
            self._warming -= 1
        return outcome

    async def _warm(self, request: Warm) -> MigrationAnswer:
        until = time.monotonic() + request.within_s
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
            sampling=ONE_TOKEN,
            priority=request.priority,
            key=request.key,
            cache_salt=request.cache_salt,
            adapter=request.adapter,
            hold_s=max(self._reservations.until(request.request_id) - time.monotonic(), 0.0),
        )
        warm = RequestEpoch(work.request_id, work.epoch)
        outcome = await self._warm_requests.run(work, until, lambda: self._submit(request, work))
        if outcome.refused is not None:
            await self._cancel([warm])
        else:
            warmed = Warmed(warm, request.token_ids, request.cache_salt, request.adapter)
            await self._cancel(self._reservations.hold(request.request_id, warmed))
        return self._answer(outcome)

    async def _submit(self, request: Warm, work: Submit) -> WarmOutcome:
        """Submit the warm request to the engine, unless too much of it would have to be computed here."""
        earlier = self._reservations.warmed(request.request_id, work.token_ids, work.cache_salt, work.adapter)
        near = earlier is not None and len(work.token_ids) - len(earlier.token_ids) <= self._max_computed_tokens()
        if earlier is not None and near and await self._warm_requests.grow(work, earlier.request):
            return WarmOutcome()
        return await self._warm_requests.pull(work, request.source, self._engine.warm)

    def _max_computed_tokens(self) -> int:
        engine = self._context.announcer.presence.engine
        return 0 if engine is None else MAX_COMPUTED_BLOCKS * engine.block_size

    def _answer(self, outcome: WarmOutcome) -> MigrationAnswer:
        engine = self._context.announcer.presence.engine
        if outcome.refused is not None or outcome.pulled is None or engine is None:
            return MigrationAnswer(outcome.refused)
        blocks, rest, size = outcome.blocks, outcome.pulled.answer.rest, engine.block_bytes
        tokens = blocks * engine.block_size + rest
        return MigrationAnswer(None, tokens, None if size is None else (blocks + (rest > 0)) * size)

    async def _cancel(self, warm: list[RequestEpoch]) -> None:
        """Cancel warm requests in the engine, and release the KV held for them."""
        if warm:
            await self._engine.cancel(warm)
