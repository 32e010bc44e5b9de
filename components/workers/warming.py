"""Fills the cache of a worker that is new, or has woken, with the prefixes that the fleet is asked for most.

Each worker counts the contexts that it is given (core/routing/caches/hot_prefixes.py). A new one asks all others for
theirs, adds them up, and brings the hottest prefixes into its cache by warm requests, which pull the KV from a worker
that has it. Routers take no part: they are told of the new blocks as of any others.

It must never harm. Blocks are brought in small portions, one after another, behind all requests, and none while
requests wait. It ends where the worker's share is full, so that no block is dropped for it. What cannot be pulled is
not computed.
"""

from __future__ import annotations

import asyncio
import logging
import struct
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from components.workers.kv_puller import KvPuller
from components.workers.requests.counters import EpochEvents
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core.errors import BusError, DecodeError, EngineError, RequestError
from dynamo_local.core.fleet.view import ENGINE_ROLES, FleetView
from dynamo_local.core.messages.kv import (
    MOST_TOLD_BLOCKS,
    MOST_TOLD_TOKENS,
    HotPrefixesAnswer,
    HotPrefixesQuestion,
    Origin,
)
from dynamo_local.core.messages.presence import EngineInfo, Load
from dynamo_local.core.messages.work import RequestEpoch, Submit
from dynamo_local.core.ports import Engine, PulledPrefix
from dynamo_local.core.priority.classes import MOST_PRIORITY
from dynamo_local.core.routing.caches.hot_prefixes import (
    MOST_DEPTH,
    PORTION_BLOCKS,
    HotChain,
    HotPrefixes,
    hottest_of_all,
)
from dynamo_local.core.routing.pulling import transfers
from dynamo_local.process.context import ServiceContext

_log = logging.getLogger(__name__)

DEFAULT_SHARE = 0.5
"""Share of the KV cache. The other half is for what the worker is asked for meanwhile."""

_OTHERS_WITHIN_S = 5.0
"""Time for another worker to be heard of. Those of a server that starts have nothing yet."""

_ALL_HEARD_S = 0.2
"""After the first one: others answer the same probe."""

_ANSWER_S = 2.0

_WITHIN_S = 30.0
"""Time for all. By then the worker's own requests have filled its cache with what it needs."""

_PORTION_S = 5.0

LOOK_AGAIN_S = 0.1
"""Time between two looks whether requests still wait."""

_TOKEN_BYTES = 4

_T = TypeVar("_T")


@dataclass
class HotPrefixWarmUp:
    """Of one worker. `cached_blocks`: number of blocks that the engine has
    cached; `share`: fraction of the KV cache that may be cached in the end, 0: nothing is counted or brought."""

    context: ServiceContext
    engine: Engine
    warm_requests: WarmRequests
    cached_blocks: Callable[[], int]
    is_parked: Callable[[], bool]
    share: float = DEFAULT_SHARE
    _asked: HotPrefixes = field(default_factory=HotPrefixes, init=False)
    _task: asyncio.Task[None] | None = field(default=None, init=False)
    _number: int = field(default=0, init=False)
    _fetching: bool = field(default=False, init=False)
    _closed: bool = field(default=False, init=False)

    async def start(self) -> None:
        """Begin to answer, and to warm this worker up."""
        if self._engine_info is None:
            return
        subject = self.context.subjects.hot_prefixes(self.context.lease)
        await self.context.bus.serve(subject, HotPrefixesQuestion, self._on_question)
        self.begin()

    def begin(self) -> None:
        """Warm this worker up, unless that is under way."""
        if self._engine_info is not None and (self._task is None or self._task.done()):
            self._task = self.context.tasks.spawn("warm up", self._run())

    def close(self) -> None:
        """Bring nothing more: the worker drains."""
        self._closed = True

    def is_fetching(self) -> bool:
        """Whether the engine is being used."""
        return self._fetching

    def taken(self, work: Submit) -> None:
        """Count a request. One that goes on elsewhere was counted there."""
        engine = self._engine_info
        if engine is not None and work.position == 0 and not work.pools:
            origin = Origin(work.cache_salt, work.adapter)
            # What are no token ids is refused by the engine.
            with suppress(struct.error):
                self._asked.ask(origin, _blocks(work.token_ids, engine.block_size), time.monotonic())

    @property
    def _engine_info(self) -> EngineInfo | None:
        """None: this engine pulls nothing, does not tell what it has, or is not to be warmed up."""
        presence = self.context.announcer.presence
        engine = presence.engine
        usable = engine is not None and engine.kv_events and transfers(presence) and self.share > 0
        return engine if usable else None

    async def _on_question(self, question: HotPrefixesQuestion) -> HotPrefixesAnswer:
        engine = self._engine_info
        assert engine is not None, "it serves this only then"
        most = min(question.most_blocks, MOST_TOLD_BLOCKS, MOST_TOLD_TOKENS // engine.block_size)
        return self._asked.tell(0 if self.is_parked() else most, engine.block_size, time.monotonic())

    async def _run(self) -> None:
        try:
            await self._warm_up()
        except Exception:  # noqa: BLE001
            # The boundary of a warm-up, which no request depends on.
            _log.exception("the prefixes that others are asked for are not brought here")

    async def _warm_up(self) -> None:
        told = await self._ask(await self._sources())
        engine, until = self._engine_info, time.monotonic() + _WITHIN_S
        if not told or engine is None:
            return
        began, blocks = time.monotonic(), 0
        for chain, source in hottest_of_all(told, self._room(engine), began):
            brought = await self._bring(chain, source, engine, until)
            if brought is None:
                break
            blocks += brought
        took_s = time.monotonic() - began
        _log.info("%d blocks of prefixes that others are asked for were brought here in %.1f s", blocks, took_s)

    async def _sources(self) -> list[str]:
        """The other workers that could lend KV, once there are any. Workers are heard for this time alone."""
        fleet, news = FleetWatch(self.context.bus, self.context.subjects), asyncio.Event()
        fleet.subscribe(lambda _: news.set())
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(_OTHERS_WITHIN_S):
                    await fleet.start()
                    while not self._lenders(fleet.view):
                        news.clear()
                        await news.wait()
                    await asyncio.sleep(_ALL_HEARD_S)
        finally:
            await fleet.stop()
        return self._lenders(fleet.view)

    def _lenders(self, fleet: FleetView) -> list[str]:
        ready = fleet.ready(ENGINE_ROLES)
        return [each.lease for each in ready if each.lease != self.context.lease and transfers(each)]

    async def _ask(self, sources: Sequence[str]) -> Mapping[str, HotPrefixesAnswer]:
        """What each of these was asked for, of those that answer."""
        answers = await asyncio.gather(*map(self._answer_of, sources))
        engine = self._engine_info
        size = 0 if engine is None else engine.block_size
        found = zip(sources, answers, strict=True)
        return {lease: told for lease, told in found if told is not None and told.blocks and told.block_tokens == size}

    async def _answer_of(self, source: str) -> HotPrefixesAnswer | None:
        question = HotPrefixesQuestion(MOST_TOLD_BLOCKS)
        try:
            subject = self.context.subjects.hot_prefixes(source)
            return await self.context.bus.ask(subject, question, HotPrefixesAnswer, timeout_s=_ANSWER_S)
        except (BusError, DecodeError) as error:
            # One that is not to be warmed up listens to nothing.
            _log.debug("worker %s does not tell what it is asked for: %s", source, error)
            return None

    async def _bring(self, chain: HotChain, source: str, engine: EngineInfo, until: float) -> int | None:
        """Bring a prefix from another worker, as far as that has it. Returns the number of blocks; None: it is time to
        end, or there is no room."""
        if not await self._may_go_on(until):
            return None
        had, brought = await self._using_engine(self._cached(chain)), 0
        while had < len(chain.blocks):
            count = min(had + PORTION_BLOCKS, len(chain.blocks))
            if not await self._may_go_on(until) or count - had > self._room(engine):
                return None
            outcome = await self._using_engine(self._fetch(chain, count, source))
            if outcome.refused is not None:
                _log.debug("a prefix that others are asked for is not brought here: %s", outcome.refused)
                break
            brought += outcome.blocks
            had = count
        return brought

    async def _may_go_on(self, until: float) -> bool:
        """Wait until no request waits. False: it is time to end."""
        while time.monotonic() < until and not self._closed and not self.is_parked():
            presence = self.context.announcer.presence
            if presence.exclusive is not None:
                return False
            if presence.load is None or not presence.load.waiting:
                return True
            await asyncio.sleep(LOOK_AGAIN_S)
        return False

    async def _using_engine(self, use: Coroutine[Any, Any, _T]) -> _T:
        """Await what uses the engine, which is not to park meanwhile. Nothing is awaited since it was seen awake."""
        self._fetching = True
        try:
            return await use
        finally:
            self._fetching = False

    async def _cached(self, chain: HotChain) -> int:
        """Number of a prefix's blocks that are cached here; all, if the engine cannot pull it."""
        prefix = self.engine.prefix(_context(chain.blocks), chain.origin.cache_salt, chain.origin.adapter)
        return len(chain.blocks) if prefix is None else await self.engine.cached(prefix)

    async def _fetch(self, chain: HotChain, count: int, source: str) -> WarmOutcome:
        """Bring the first blocks of a prefix."""
        self._number += 1
        work = Submit(
            "warm up",
            self._number,
            frontend="",
            token_ids=_context(chain.blocks[:count]),
            sampling=ONE_TOKEN,
            priority=MOST_PRIORITY,
            cache_salt=chain.origin.cache_salt,
            adapter=chain.origin.adapter,
        )
        outcome = await self.warm_requests.run(
            work,
            time.monotonic() + _PORTION_S,
            lambda: self.warm_requests.pull(work, source, self.engine.submit),
        )
        if outcome.refused is not None:
            await self.engine.cancel([RequestEpoch(work.request_id, work.epoch)])
        return outcome

    def _room(self, engine: EngineInfo) -> int:
        return int(engine.kv_blocks * self.share) - self.cached_blocks()


def _blocks(token_ids: Sequence[int], block_size: int) -> Iterator[bytes]:
    """The contents of a context's blocks that can be cached. Raises struct.error for what is no token id."""
    count = min((len(token_ids) - 1) // block_size, MOST_DEPTH)
    packed = struct.pack(f"<{count * block_size}I", *token_ids[: count * block_size])
    size = block_size * _TOKEN_BYTES
    return (packed[start : start + size] for start in range(0, count * size, size))


def _context(blocks: Sequence[bytes]) -> list[int]:
    """The tokens of blocks, and one more: the last token of a context is computed in any case, and in no full block."""
    packed = b"".join(blocks)
    token_ids = struct.unpack(f"<{len(packed) // _TOKEN_BYTES}I", packed)
    return [*token_ids, token_ids[0]]


# Warm requests: contexts that are computed for one token, which is thrown away, so that their KV is in the cache.
#
# They pull the KV that another worker has; one that would have to compute much is not run. Warm requests belong to the
# worker: frontends do not hear of them, and they are not counted in the load that the worker announces.

MAX_COMPUTED_BLOCKS = 2
"""Full blocks computed for a warm request. KV of which more cannot be pulled is better left where it is."""

ONE_TOKEN = msgspec.Raw(msgspec.msgpack.encode({"max_tokens": 1, "temperature": 0.0}))
"""Sampling parameters of warm requests."""


@dataclass(frozen=True)
class WarmOutcome:
    """What came of a warm request. `refused`: why it was not run to its end. `pulled`: what was pulled for it."""

    refused: str | None = None
    pulled: PulledPrefix | None = None

    @property
    def blocks(self) -> int:
        """Number of full blocks that were pulled."""
        return 0 if self.pulled is None else self.pulled.answer.blocks - self.pulled.cached


class WarmRequests:
    """Warm requests of one engine."""

    def __init__(self, engine: Engine, puller: KvPuller, epoch_events: EpochEvents) -> None:
        self._engine = engine
        self._kv_puller = puller
        self._epoch_events = epoch_events
        self._in_engine: set[RequestEpoch] = set()

    def are_running(self) -> bool:
        """Whether the engine has any."""
        return bool(self._in_engine)

    def without(self, load: Load) -> Load:
        """The load of the engine less its warm requests."""
        if not self._in_engine or load.running is None or load.waiting is None:
            return load
        # Which of the two they count for is not known; most of their time they wait for blocks to be read.
        warm = len(self._in_engine)
        waiting = max(load.waiting - warm, 0)
        running = max(load.running - (warm - (load.waiting - waiting)), 0)
        return msgspec.structs.replace(load, running=running, waiting=waiting)

    async def run(self, work: Submit, until: float, submit: Callable[[], Awaitable[WarmOutcome]]) -> WarmOutcome:
        """Have `submit` (`pull` or `grow`) put a warm request to the engine, and wait until it has been computed, at
        most `until` (CLOCK_MONOTONIC). One that did not end is still to be cancelled in the engine."""
        warm = RequestEpoch(work.request_id, work.epoch)
        events = self._epoch_events.add(warm)
        try:
            outcome = await submit()
            if outcome.refused is None:
                async with asyncio.timeout(until - time.monotonic()):
                    await events.computed.wait()
        except (RequestError, EngineError) as error:
            return WarmOutcome(str(error))
        except TimeoutError:
            return WarmOutcome("the worker is too busy")
        else:
            return outcome
        finally:
            self._in_engine.discard(warm)
            self._epoch_events.forgotten([warm])
            await self._kv_puller.done([warm])

    async def pull(
        self, work: Submit, source: str, put: Callable[[Submit, PulledPrefix | None], Awaitable[None]]
    ) -> WarmOutcome:
        """Put a warm request to the engine by `put`, with the KV that `source` has of it, unless too much would have to
        be computed here."""
        pulled = await self._kv_puller.pull(work, source)
        refused = await self._refusal(work, pulled)
        if refused is not None:
            return WarmOutcome(refused)
        self._in_engine.add(RequestEpoch(work.request_id, work.epoch))
        await put(work, pulled)
        return WarmOutcome(pulled=pulled)

    async def grow(self, work: Submit, earlier: RequestEpoch) -> bool:
        """Put a warm request to the engine that grows from an earlier one. Returns False if it cannot."""
        warm = RequestEpoch(work.request_id, work.epoch)
        self._in_engine.add(warm)
        grown = await self._engine.grow(work, earlier, warm=True)
        if not grown:
            self._in_engine.discard(warm)
        return grown

    async def _refusal(self, work: Submit, pulled: PulledPrefix | None) -> str | None:
        """Why the warm request is not run, or None: too much of its context would have to be computed here."""
        if pulled is not None:
            lacking = len(pulled.hashes) - pulled.answer.blocks
        else:
            prefix = self._engine.prefix(work.token_ids, work.cache_salt, work.adapter)
            if prefix is None:
                return "the engine cannot pull KV"
            lacking = len(prefix.hashes) - await self._engine.cached(prefix)
        return "too little of its KV can be pulled from the source" if lacking > MAX_COMPUTED_BLOCKS else None
