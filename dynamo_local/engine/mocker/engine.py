"""The scheduler in time, as an engine: `step` waits for work, computes, and lets the modelled time pass."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from dynamo_local.core.errors import EngineError, RequestError
from dynamo_local.core.messages import EngineInfo, RequestEpoch, Submit, TokenDelta
from dynamo_local.core.ports import Progress, Step
from dynamo_local.engine.mocker import scheduler, sequence
from dynamo_local.engine.mocker.logprobs import logprobs_of
from dynamo_local.engine.mocker.sampling import read_sampling
from dynamo_local.engine.mocker.settings import MockerSettings

_QUEUED, _SCHEDULED, _PREEMPTED = 1, 2, 3


@dataclass(slots=True)
class _Live:
    current: RequestEpoch
    sequence: sequence.Sequence
    position: int
    """Of the next token."""
    events: list[tuple[int, float]] = field(default_factory=list)
    """Not told yet."""


@dataclass(frozen=True)
class _InFlight:
    """A step whose time is not up."""

    due: float
    emitted: tuple[sequence.Sequence, ...]


class MockerEngine:
    """Implements `core.ports.Engine`. `clock` is CLOCK_MONOTONIC, `sleep` asyncio's, or both are virtual."""

    def __init__(
        self,
        settings: MockerSettings,
        *,
        model: str = "mocker",
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._settings = settings
        self._model = model
        self._clock = clock
        self._sleep = sleep
        self._scheduler = scheduler.Scheduler(settings)
        self._live: dict[RequestEpoch, _Live] = {}
        self._by_sequence: dict[sequence.Sequence, _Live] = {}
        self._in_flight: _InFlight | None = None
        self._load_untold = False
        """Something was cancelled since the last step told the load."""
        self._closed = False
        self._wake = asyncio.Event()
        self._nap: asyncio.Future[None] | None = None

    async def start(self, progress: Progress) -> EngineInfo:
        progress("starting the mocker")
        if self._settings.mocker_start_s > 0:
            await self._pass_time(self._settings.mocker_start_s)
        self._check_open()
        return EngineInfo(
            engine="mocker",
            model=self._model,
            max_model_len=self._settings.context_limit,
            block_size=self._settings.mocker_block_size,
            kv_blocks=self._settings.mocker_kv_blocks,
            max_num_seqs=self._settings.mocker_max_num_seqs,
        )

    async def submit(self, work: Submit) -> None:
        self._check_open()
        current = RequestEpoch(work.request_id, work.epoch)
        if current in self._live:
            raise RequestError(f"{current} is being worked on already")
        queued = self._scheduler.submit(
            work.token_ids,
            read_sampling(work.sampling, self._settings.mocker_vocab_size),
            priority=work.priority,
            arrival_time=work.arrival_time,
            cache_salt=work.cache_salt,
        )
        live = _Live(current, queued, work.position, [(_QUEUED, self._clock())])
        self._live[current] = self._by_sequence[queued] = live
        self._wake.set()

    async def cancel(self, requests: Sequence[RequestEpoch]) -> None:
        for request in requests:
            live = self._live.pop(request, None)
            if live is not None:
                del self._by_sequence[live.sequence]
                self._scheduler.cancel(live.sequence)
                self._load_untold = True

    async def step(self) -> Step:
        """As the port says. A cancelled call loses nothing: the next one goes on with the same step."""
        if self._in_flight is None and not await self._find_work():
            return self._told(())
        if self._in_flight is None:
            self._in_flight = self._begin()
        await self._pass_time(self._in_flight.due - self._clock())
        self._check_open()
        emitted, self._in_flight = self._in_flight.emitted, None
        return self._told(emitted)

    async def close(self, deadline_s: float) -> None:
        self._closed = True
        self._wake.set()
        if self._nap is not None:
            self._nap.cancel()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the mocker engine is closed")

    async def _find_work(self) -> bool:
        """Wait until there is something to compute (True) or a changed load to tell (False)."""
        while True:
            self._check_open()
            if self._scheduler.has_work:
                return True
            if self._load_untold:
                return False
            self._wake.clear()
            await self._wake.wait()

    def _begin(self) -> _InFlight:
        now = self._clock()
        outcome = self._scheduler.step()
        for admitted in outcome.admitted:
            self._by_sequence[admitted].events.append((_SCHEDULED, now))
        for preempted in outcome.preempted:
            self._by_sequence[preempted].events.append((_PREEMPTED, now))
        due = now + self._settings.step_s(outcome.prefill_tokens, outcome.decode_seqs)
        return _InFlight(due, outcome.emitted)

    async def _pass_time(self, seconds: float) -> None:
        """Sleep until the time is up or the engine is closed. Always lets others run."""
        if seconds <= 0:
            await self._sleep(0)
            return
        nap = self._nap = asyncio.ensure_future(self._sleep(seconds))
        try:
            await asyncio.wait([nap])
        finally:
            nap.cancel()
            self._nap = None
        if not self._closed:
            nap.result()

    def _told(self, emitted: tuple[sequence.Sequence, ...]) -> Step:
        self._load_untold = False
        deltas = [self._delta(live) for drawn in emitted if (live := self._by_sequence.get(drawn)) is not None]
        return Step(self._clock(), tuple(deltas), self._scheduler.load)

    def _delta(self, live: _Live) -> TokenDelta:
        drawn = live.sequence
        token_id, candidates = drawn.tokens[-1], drawn.sampling.logprobs
        vocab_size = self._settings.mocker_vocab_size
        delta = TokenDelta(
            request_id=live.current.request_id,
            epoch=live.current.epoch,
            position=live.position,
            token_ids=[token_id],
            finish=drawn.finish,
            stop_reason=drawn.stop_reason,
            logprobs=None if candidates is None else logprobs_of(token_id, candidates, vocab_size),
            cached_tokens=drawn.cached_tokens if drawn.drawn == 1 else None,
            events=tuple(live.events),
        )
        live.position += 1
        live.events.clear()
        if drawn.finish is not None:
            del self._live[live.current], self._by_sequence[drawn]
        return delta
