"""Taking in requests that move here: keep room for them, and have their KV in the cache before they come.

The KV comes by a *warm request*: the context so far as a prompt, for one token that nobody wants. It pulls the full
blocks from the worker that the request still runs on, computes the rest, and all that stays here when it ends. A later
warm request, and in the end the request itself, grow from it: only the tokens that have come since are computed. Warm
requests are the worker's own: no frontend hears of them, and they are no part of the load that it tells of.
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

MOST_WARMING = 8
"""Warm requests at the same time."""

LONGEST_ROOM_S = 120.0
"""However long a frontend asks for: it may die and never tell."""

_MOST_COMPUTED_BLOCKS = 2
"""Of a warm request. What is not pulled is better left to the source."""

_SET_APART = "the worker is set apart for one request"

_ONE_TOKEN = msgspec.Raw(msgspec.msgpack.encode({"max_tokens": 1, "temperature": 0.0}))


class MigrationTarget:
    """Of one worker. `running` tells how many requests it has that have not finished."""

    def __init__(
        self,
        context: ServiceContext,
        engine: Engine,
        puller: KvPuller,
        watches: EpochEvents,
        running: Callable[[], int],
    ) -> None:
        self._context = context
        self._engine = engine
        self._puller = puller
        self._watches = watches
        self._running = running
        self._guests = Reservations()
        self._warmed = 0
        """Warm requests so far, which they are numbered by."""
        self._warming = 0
        self._in_engine: set[RequestEpoch] = set()
        self._closed = False

    async def start(self) -> None:
        """Answer from now on."""
        subject = self._context.subjects.moves(self._context.lease)
        await self._context.bus.serve(subject, MigrationRequest, self._on_request)

    def is_warming(self) -> bool:
        """Whether the engine computes for guests."""
        return bool(self._in_engine)

    def close(self) -> None:
        """Take nobody in any more: the worker drains."""
        self._closed = True

    def arrived(self, work: Submit) -> RequestEpoch | None:
        """A request has been submitted. Returns the warm request that it can grow from, if there is one."""
        self._guests.arrive(work.request_id)
        warmed = self._guests.warmed(work.request_id, work.token_ids, work.cache_salt, work.adapter)
        return None if warmed is None else warmed.request

    async def begun(self, requests: Iterable[RequestEpoch]) -> None:
        """These have brought a token: who was a guest among them has what was held for it."""
        for request in requests:
            if self._guests.expects(request.request_id):
                await self._let_go(self._guests.leave(request.request_id))

    async def expire(self, now: float) -> None:
        """Forget guests that have not come in time."""
        await self._let_go(self._guests.expire(now))

    def has_guests_of(self, frontend: str) -> bool:
        return bool(self._guests.of_frontend(frontend))

    async def forget(self, frontend: str) -> None:
        """It is gone, and nobody of its comes any more."""
        for request_id in self._guests.of_frontend(frontend):
            await self._let_go(self._guests.leave(request_id))

    def without_guests(self, load: Load) -> Load:
        """The load without warm requests."""
        if not self._in_engine or load.running is None or load.waiting is None:
            return load
        # Most of their time they wait for blocks to be read.
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
                await self._let_go(self._guests.leave(request.request_id))

    def _reserve(self, word: Reserve) -> str | None:
        """Why there is no room, or None."""
        if self._closed:
            return "the worker is draining"
        presence = self._context.announcer.presence
        if presence.exclusive is not None:
            return _SET_APART
        engine, load, running = presence.engine, presence.load, self._running()
        if engine is None or load is None or load.kv_usage is None:
            return "its load is not known yet"
        if word.floor is not None and not self._stays_free(word.tokens, word.floor):
            return "it would be too full"
        # An engine whose KV nobody reads tells of no pins.
        used = load.kv_usage + (load.kv_pinned or 0.0)
        return self._guests.reserve(
            word.request_id,
            word.frontend,
            blocks=-(-(word.tokens + 1) // engine.block_size),
            until=min(word.until, time.monotonic() + LONGEST_ROOM_S),
            free_slots=engine.max_num_seqs - running,
            free_blocks=int(engine.kv_blocks * (1 - used)),
        )

    def _stays_free(self, tokens: int, floor: float) -> bool:
        """Whether its freeness is at least that with all its guests and this one."""
        presence, guests = self._context.announcer.presence, self._guests
        assert presence.engine is not None, "only workers that know themselves are asked"
        taken = guests.awaited_blocks * presence.engine.block_size + tokens
        instance = instance_of(presence, time.monotonic(), Usage(taken, requests=guests.awaited + 1))
        return instance is not None and freeness(instance) >= floor

    async def _warm_and_answer(self, word: Warm, answer: Answer) -> None:
        self._warming += 1
        try:
            outcome = await self._warm(word)
        except Exception:  # noqa: BLE001
            # The boundary of a warm request, which no request depends on.
            _log.exception("%s could not be warmed", word.request_id)
            outcome = MigrationAnswer("the worker could not do it")
        finally:
            self._warming -= 1
        await answer.send(outcome)

    async def _warm(self, word: Warm) -> MigrationAnswer:
        if not self._guests.expects(word.request_id):
            return MigrationAnswer("no room is kept for it")
        if self._warming > MOST_WARMING:
            return MigrationAnswer("enough requests are moving there")
        if self._context.announcer.presence.exclusive is not None:
            return MigrationAnswer(_SET_APART)
        self._warmed += 1
        work = Submit(
            f"warm {word.request_id}",
            self._warmed,
            frontend="",
            token_ids=word.token_ids,
            sampling=_ONE_TOKEN,
            priority=word.priority,
            cache_salt=word.cache_salt,
            adapter=word.adapter,
            hold_s=max(self._guests.until(word.request_id) - time.monotonic(), 0.0),
        )
        request = RequestEpoch(work.request_id, work.epoch)
        answer = await self._compute(request, work, word)
        if answer.refused is not None:
            await self._let_go([request])
        else:
            warmed = Warmed(request, word.token_ids, word.cache_salt, word.adapter)
            await self._let_go(self._guests.hold(word.request_id, warmed))
        return answer

    async def _compute(self, request: RequestEpoch, work: Submit, word: Warm) -> MigrationAnswer:
        """Have the warm request run."""
        watch = self._watches.add(request)
        try:
            answer = await self._put(request, work, word)
            if answer.refused is None:
                async with asyncio.timeout(word.until - time.monotonic()):
                    await watch.computed.wait()
        except (RequestError, EngineError) as error:
            return MigrationAnswer(str(error))
        except TimeoutError:
            return MigrationAnswer("the worker is too busy")
        else:
            return answer
        finally:
            self._in_engine.discard(request)
            self._watches.forgotten([request])
            await self._puller.done([request])

    async def _put(self, request: RequestEpoch, work: Submit, word: Warm) -> MigrationAnswer:
        """Give the warm request to the engine, or say why not."""
        earlier = self._guests.warmed(word.request_id, work.token_ids, work.cache_salt, work.adapter)
        if earlier is not None and len(work.token_ids) - len(earlier.token_ids) <= self._most_computed():
            self._in_engine.add(request)
            if await self._engine.grow(work, earlier.request, warm=True):
                return MigrationAnswer()
            self._in_engine.discard(request)
        pulled = await self._puller.pull(work, word.source)
        refused = await self._why_not(work, pulled)
        if refused is not None:
            return MigrationAnswer(refused)
        self._in_engine.add(request)
        await self._engine.warm(work, pulled)
        return self._pulled(pulled)

    async def _why_not(self, work: Submit, pulled: PulledPrefix | None) -> str | None:
        """Whether too much of the context would have to be computed here."""
        if pulled is not None:
            lacking = len(pulled.hashes) - pulled.answer.blocks
        else:
            prefix = self._engine.prefix(work.token_ids, work.cache_salt, work.adapter)
            if prefix is None:
                return "the engine pulls nothing"
            lacking = len(prefix.hashes) - await self._engine.cached(prefix)
        return "the source does not lend its KV" if lacking > _MOST_COMPUTED_BLOCKS else None

    def _most_computed(self) -> int:
        engine = self._context.announcer.presence.engine
        return 0 if engine is None else _MOST_COMPUTED_BLOCKS * engine.block_size

    def _pulled(self, pulled: PulledPrefix | None) -> MigrationAnswer:
        engine = self._context.announcer.presence.engine
        if pulled is None or engine is None:
            return MigrationAnswer()
        blocks, rest, size = pulled.answer.blocks - pulled.cached, pulled.answer.rest, engine.block_bytes
        tokens = blocks * engine.block_size + rest
        return MigrationAnswer(None, tokens, None if size is None else (blocks + (rest > 0)) * size)

    async def _let_go(self, warm: list[RequestEpoch]) -> None:
        """End these warm requests, or what is held of them."""
        if warm:
            await self._engine.cancel(warm)
