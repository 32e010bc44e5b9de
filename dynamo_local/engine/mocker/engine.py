"""The scheduler in time, as an engine: `step` waits for work, computes, and lets the modelled time pass."""

from __future__ import annotations

import asyncio
import math
import os
import struct
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from dynamo_local.core.errors import BadRequestError, EngineError, RequestError
from dynamo_local.core.messages.kv import PinAnswer, PinQuestion
from dynamo_local.core.messages.presence import EngineInfo
from dynamo_local.core.messages.work import (
    PREEMPTED,
    QUEUED,
    SCHEDULED,
    Array,
    Logprobs,
    RequestEpoch,
    Submit,
    TokenDelta,
)
from dynamo_local.core.ports import Prefix, Progress, PulledPrefix, Step
from dynamo_local.engine.kv.leases import Key
from dynamo_local.engine.mocker import scheduler, sequence
from dynamo_local.engine.mocker.blocks import chain_hashes, root_hash
from dynamo_local.engine.mocker.pulls import Reads, Source, fingerprint, plan_pull
from dynamo_local.engine.mocker.sequence import StepOutcome
from dynamo_local.engine.mocker.settings import MockerSettings
from dynamo_local.engine.mocker.tokens import read_sampling

_MADE_UP_S = 0.02
"""Delay of a step that the next one makes up for: what this process does between two steps is no part of the model. A
process that is not given the CPU for longer is late, as an engine would be."""


@dataclass(slots=True)
class _Live:
    current: RequestEpoch
    sequence: sequence.Sequence
    position: int
    """Position of the next token."""
    events: list[tuple[int, float]] = field(default_factory=list)
    """Events that no delta has reported yet."""


@dataclass(frozen=True)
class _InFlight:
    """A step whose time is not up."""

    due: float
    outcome: StepOutcome
    over: asyncio.Event
    """Set when its blocks are written, or never will be."""


class MockerEngine:
    """Implements `core.ports.Engine`. `clock` is CLOCK_MONOTONIC, `sleep` asyncio's, or both are virtual.

    `directory` is private to the server: a file in it is the memory that others read. None: nobody reads.
    """

    def __init__(
        self,
        settings: MockerSettings,
        directory: Path | None = None,
        *,
        model: str = "mocker",
        kv_network: str = "",
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._settings = settings
        self._directory = directory
        self._fingerprint = fingerprint(settings, model)
        self._model = model
        self._kv_network = kv_network
        self._clock = clock
        self._sleep = sleep
        self._scheduler = scheduler.Scheduler(settings)
        self._source = Source(
            self._scheduler,
            settings.mocker_longest_pin_s,
            self._fingerprint,
            clock,
            self._load_changed,
            self._written,
        )
        self._reads = Reads(settings, self._scheduler, clock)
        self._live: dict[RequestEpoch, _Live] = {}
        self._by_sequence: dict[sequence.Sequence, _Live] = {}
        self._in_flight: _InFlight | None = None
        self._due = -math.inf
        """When the last step was to end; -inf if there was nothing to do since."""
        self._load_untold = False
        """The load has changed since a step last reported it."""
        self._orders = Orders(Path(settings.mocker_orders)) if settings.mocker_orders else None
        self._ordered: Order | None = None
        """Kept once taken: an engine that has failed does not recover."""
        self._closed = False
        self._parked = False
        self._wake = asyncio.Event()
        self._process = EngineProcess(self._wake.set) if settings.mocker_process else None
        self._nap: asyncio.Future[None] | None = None

    async def start(self, progress: Progress) -> EngineInfo:
        progress("starting the mocker")
        if self._settings.mocker_start_s > 0:
            await self._pass_time(self._settings.mocker_start_s)
        self._check_open()
        if self._process is not None:
            await self._process.start()
        if self._directory is not None:
            self._scheduler.memory.share(self._directory)
        return EngineInfo(
            engine="mocker",
            model=self._model,
            max_model_len=self._settings.context_limit,
            block_size=self._settings.mocker_block_size,
            kv_blocks=self._settings.mocker_kv_blocks,
            max_num_seqs=self._settings.mocker_max_num_seqs,
            kv_events=self._settings.mocker_prefix_caching,
            kv_network=self._kv_network,
        )

    async def submit(self, work: Submit, pulled: PulledPrefix | None = None) -> None:
        self._check_open()
        if self._parked:
            # A real engine on a GPU would keep the request waiting.
            raise RequestError("the engine is parked")
        current = RequestEpoch(work.request_id, work.epoch)
        if current in self._live:
            raise RequestError(f"{current} is being worked on already")
        if work.pools:
            raise BadRequestError("the mocker has no pooled outputs (embeddings, classes, scores): it only generates")
        queued = self._scheduler.submit(
            work.token_ids,
            read_sampling(work.sampling, self._settings.mocker_vocab_size),
            priority=work.priority,
            arrival_time=work.arrival_time,
            key=work.key,
            cache_salt=work.cache_salt,
            adapter=work.adapter,
        )
        if pulled is not None:
            block_size = self._settings.mocker_block_size
            queued.pull = plan_pull(pulled, queued.hashes(self._full_blocks(work.token_ids), block_size))
        if work.hold_s > 0:
            queued.hold = sequence.Hold(current, work.hold_s)
        live = _Live(current, queued, work.position, [(QUEUED, self._clock())])
        self._live[current] = self._by_sequence[queued] = live
        self._wake.set()

    async def warm(self, work: Submit, pulled: PulledPrefix | None = None) -> None:
        await self.submit(work, pulled)

    async def grow(self, work: Submit, from_warm: RequestEpoch, *, warm: bool = False) -> bool:
        # The mocker keeps full blocks only, and any new submission finds those in the cache.
        return False

    async def cancel(self, requests: Sequence[RequestEpoch]) -> None:
        for request in requests:
            live = self._live.pop(request, None)
            if live is not None:
                del self._by_sequence[live.sequence]
                self._scheduler.cancel(live.sequence)
            if self._scheduler.leases.end(Key("hold", str(request))) or live is not None:
                self._load_changed()

    def prefix(self, token_ids: Sequence[int], cache_salt: str | None, adapter: str | None) -> Prefix | None:
        block_size, root = self._settings.mocker_block_size, root_hash(cache_salt, adapter)
        try:
            hashes = chain_hashes(token_ids, root, block_size, self._full_blocks(token_ids))
        except struct.error:
            # Not token ids at all: `submit` refuses them.
            return None
        return Prefix(self._fingerprint, tuple(hashes))

    async def cached(self, prefix: Prefix) -> int:
        return len(self._scheduler.pool.match(prefix.hashes))

    async def pin(self, question: PinQuestion) -> PinAnswer:
        return await self._source.answer(question)

    async def unpin(self, pins: Sequence[str]) -> None:
        for name in pins:
            await self.confirm(name)

    async def confirm(self, pin: str) -> bool:
        self._scheduler.leases.expire(self._clock())
        if held := self._scheduler.leases.end(Key("pin", pin)):
            self._load_changed()
        return held

    async def read_ended(self, pin: str) -> bool:
        return await self._reads.ended(pin)

    async def settle_read(self, pin: str, *, held: bool) -> None:
        if self._reads.settle(pin, held=held):
            self._load_changed()

    async def step(self) -> Step:
        """Run a step, as the port says. A cancelled call loses nothing: the next one continues the same step."""
        await self._obey()
        while self._in_flight is None:
            self._check_open()
            self._settle()
            self._in_flight = self._begin() if self._scheduler.has_work else None
            if self._in_flight is None:
                if self._load_untold:
                    return self._told(())
                await self._until_something_happens()
        await self._pass_time(self._in_flight.due - self._clock())
        if self._process is not None:
            await self._process.answer()
        self._check_open()
        ended, self._in_flight = self._in_flight, None
        self._due = ended.due
        self._scheduler.complete(ended.outcome, self._clock())
        ended.over.set()
        return self._told(ended.outcome.emitted)

    async def park(self, deadline_s: float) -> None:
        self._check_open()
        self._settle()
        if self._in_flight is not None:
            raise EngineError("the engine has requests")
        if (refused := self._scheduler.empty_cache()) is not None:
            raise EngineError(refused)
        self._parked = True
        # A step without deltas tells that nothing is cached any more.
        self._load_changed()
        # As long as an engine takes at least: others run meanwhile.
        await self._sleep(0)

    async def wake(self, deadline_s: float) -> None:
        await self._sleep(0)
        self._check_open()
        self._parked = False

    async def waited_s(self) -> float:
        """The mocker computes nothing, so it never waits for a core."""
        return 0.0

    async def close(self, deadline_s: float) -> None:
        self._closed = True
        self._wake.set()
        self._scheduler.memory.close()
        if self._in_flight is not None:
            self._in_flight.over.set()
        if self._nap is not None:
            self._nap.cancel()
        if self._process is not None:
            await self._process.end()

    async def _obey(self) -> None:
        """Fail as ordered, if anything is."""
        if self._orders is not None and self._ordered is None:
            self._ordered = self._orders.take()
        if self._ordered == "hang":
            await asyncio.get_running_loop().create_future()
        self._check_open()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the mocker engine is closed")
        if self._process is not None and self._process.dead:
            raise process_died()
        if self._ordered == "raise":
            raise EngineError("the mocker engine was ordered to fail")

    def _full_blocks(self, token_ids: Sequence[int]) -> int:
        """Count the blocks of a context that can be cached. The last token is in none: it is always computed."""
        return max(len(token_ids) - 1, 0) // self._settings.mocker_block_size

    def _load_changed(self) -> None:
        self._load_untold = True
        self._wake.set()

    def _settle(self) -> None:
        """End what has been read, and what was kept for readers long enough."""
        now = self._clock()
        read, expired = self._reads.end(now), self._scheduler.leases.expire(now)
        self._load_untold |= read or expired

    async def _until_something_happens(self) -> None:
        """Sleep until somebody calls, or something ends by itself."""
        self._wake.clear()
        self._due = -math.inf
        end = min(self._reads.next_end, self._scheduler.leases.next_end)
        waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._wake.wait())]
        if end < math.inf:
            waits.append(asyncio.ensure_future(self._sleep(max(end - self._clock(), 0.0))))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _written(self, blocks: list[int]) -> bool:
        """Wait until no step under way writes one of these blocks. False: the engine has been closed."""
        in_flight = self._in_flight
        if in_flight is not None and not in_flight.outcome.filled.isdisjoint(blocks):
            await in_flight.over.wait()
        return not self._closed

    def _begin(self) -> _InFlight | None:
        """Begin a step, and reads. None: there is nothing to compute now."""
        now = self._clock()
        outcome = self._scheduler.begin(now)
        self._reads.start(outcome.reads, now)
        for admitted in outcome.admitted:
            self._by_sequence[admitted].events.append((SCHEDULED, now))
        for preempted in outcome.preempted:
            self._by_sequence[preempted].events.append((PREEMPTED, now))
        if not outcome.computed:
            self._load_untold |= bool(outcome.reads or outcome.preempted)
            return None
        due = self._step_begins(now) + self._settings.step_s(outcome.prefill_tokens, outcome.decode_seqs)
        return _InFlight(due, outcome, asyncio.Event())

    def _step_begins(self, now: float) -> float:
        """When a step begins that is planned now: with the end of the one before, if there was work all the time."""
        return self._due if now - self._due <= _MADE_UP_S else now

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

    def _told(self, emitted: Iterable[sequence.Sequence]) -> Step:
        self._load_untold = False
        now = self._clock()
        deltas = [self._delta(live, now) for drawn in emitted if (live := self._by_sequence.get(drawn)) is not None]
        cache = self._scheduler.pool.log.take() if self._settings.mocker_prefix_caching else None
        return Step(now, tuple(deltas), self._scheduler.load, cache)

    def _delta(self, live: _Live, now: float) -> TokenDelta:
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
            events=tuple((kind, now - at) for kind, at in live.events),
        )
        live.position += 1
        live.events.clear()
        if drawn.finish is not None:
            del self._live[live.current], self._by_sequence[drawn]
        return delta


# Pretended log-probabilities in the shape of vLLM's.


def logprobs_of(token_id: int, candidates: int, vocab_size: int) -> Logprobs:
    """Make those of one position: the chosen token, then the `candidates` most likely ones (-1: the whole vocabulary).

    As in vLLM under greedy sampling, the chosen token is also the first of the most likely ones. The i-th
    of them has probability 2**-i, and their ids count up from the chosen one, so that no id comes twice
    among them.
    """
    count = vocab_size if candidates < 0 else candidates
    ids = [token_id, *((token_id + i) % vocab_size for i in range(count))]
    values = [-math.log(2), *(-(i + 1) * math.log(2) for i in range(count))]
    return Logprobs(
        Array("int64", (1, count + 1), struct.pack(f"<{count + 1}q", *ids)),
        Array("float32", (1, count + 1), struct.pack(f"<{count + 1}f", *values)),
        Array("int64", (1,), struct.pack("<q", 1)),
    )


# Failures that a test orders of one engine while it runs. Not here: what the engine does then.

Order = Literal["raise", "hang"]
"""The next step raises EngineError, as every call after it; or it never ends."""


class Orders:
    """Reads the orders for this process: a file in the folder that is named by its pid and contains the order."""

    def __init__(self, folder: Path) -> None:
        self._file = order_file(folder, os.getpid())

    def take(self) -> Order | None:
        """Take the order, if there is one. Its file is removed, by which the test sees that it was taken."""
        try:
            text = self._file.read_text()
        except FileNotFoundError:
            return None
        self._file.unlink()
        return next((order for order in get_args(Order) if order == text), None)


def order_file(folder: Path, pid: int) -> Path:
    """Path of the order for a process' engine. Write another file and rename it to this one, so that it is whole."""
    return folder / str(pid)


# A process that a mocker depends on, as vLLM does on its engine core. Tests kill or stop it.

_ECHO = "cat"
"""Ends when its input does, and so with the process that has started it."""


class EngineProcess:
    """Process that does nothing but answer. `on_end` is called when it has died."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._process: Process | None = None
        self._waiting: asyncio.Task[int] | None = None

    @property
    def dead(self) -> bool:
        return self._waiting is not None and self._waiting.done()

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(_ECHO, stdin=PIPE, stdout=PIPE)
        self._waiting = asyncio.create_task(self._process.wait(), name="mocker's process")
        self._waiting.add_done_callback(lambda _: self._on_end())

    async def answer(self) -> None:
        """Wait until the process has answered: for ever, if it is stopped. Raises EngineError if it is dead."""
        assert self._process is not None, "it was started"
        there, back = self._process.stdin, self._process.stdout
        assert there is not None, "it was started with pipes"
        assert back is not None, "it was started with pipes"
        try:
            there.write(b".")
            await there.drain()
            await back.readexactly(1)
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            raise process_died() from error

    async def end(self) -> None:
        """Kill it, and wait for its end."""
        if self._process is not None and not self.dead:
            self._process.kill()
        if self._waiting is not None:
            await self._waiting


def process_died() -> EngineError:
    return EngineError("the mocker's process died")
