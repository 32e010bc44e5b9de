"""A simulated worker: the mocker's own scheduler in virtual time, with a model of how long its steps take."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from dynamo_local.core.fleet.rates import RateMeter
from dynamo_local.core.messages.presence import ClassUsage, Load
from dynamo_local.core.ports import CacheChanges
from dynamo_local.core.priority.classes import PriorityClass, class_of
from dynamo_local.engine.kv.leases import Key
from dynamo_local.engine.mocker.scheduler import Scheduler
from dynamo_local.engine.mocker.sequence import Pull, Read, Sequence, StepOutcome
from dynamo_local.engine.mocker.settings import MockerSettings
from dynamo_local.sim.requests import Arrival, Counted, Gaps, Served, counted

# Events in virtual time: a heap of times.

Action = Callable[[], None]


class Agenda:
    """What is to happen, and when, in seconds. Of equal times, `late` actions come last, else the first entered."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, bool, int, Action]] = []
        self._entered = 0

    def at(self, when: float, action: Action, *, late: bool = False) -> None:
        """Enter an action. `when` is not before now."""
        assert when >= self.now, f"{when} is before {self.now}"
        self._entered += 1
        heapq.heappush(self._heap, (when, late, self._entered, action))

    def after(self, delay_s: float, action: Action) -> None:
        """Do it once that time has passed: at once, if it is 0."""
        if delay_s > 0:
            self.at(self.now + delay_s, action)
        else:
            action()

    @property
    def is_empty(self) -> bool:
        return not self._heap

    def run(self) -> None:
        """Do everything that was entered, and what that enters, in order."""
        while self._heap:
            self.now, _, _, action = heapq.heappop(self._heap)
            action()


# Models of how long an engine's steps take.


@dataclass(frozen=True)
class StepWork:
    """Work of a step: tokens of prompts, and the requests that decode, with their contexts' tokens together."""

    prefill_tokens: int
    decode_seqs: int
    context_tokens: int


def work_of(outcome: StepOutcome) -> StepWork:
    """Work of a step that the scheduler has begun."""
    prefill, seqs, context = 0, 0, 0
    for sequence, count in outcome.computed.items():
        if count == 1 and sequence.drawn:
            seqs += 1
            context += sequence.length
        else:
            prefill += count
    return StepWork(prefill, seqs, context)


class Timing(Protocol):
    def step_s(self, work: StepWork) -> float:
        """Time of a step, in seconds."""

    def decode_s(self, work: StepWork, steps: int) -> float:
        """Time of so many steps in which the same requests decode, each a token a step, from `work` on, in seconds."""


@dataclass(frozen=True)
class MockerTiming:
    """The mocker's own model."""

    settings: MockerSettings

    def step_s(self, work: StepWork) -> float:
        return self.settings.step_s(work.prefill_tokens, work.decode_seqs)

    def decode_s(self, work: StepWork, steps: int) -> float:
        return steps * self.step_s(work)


@dataclass(frozen=True)
class DynamoTiming:
    """The default model of Dynamo's simulator (ai-dynamo 1.6.1), found by single requests and pairs of them: to five
    digits, a step takes a quadratic function of the prompt tokens that it computes, plus one of the share of the KV
    cache that the decoding requests' contexts fill."""

    cache_tokens: int

    def step_s(self, work: StepWork) -> float:
        prefill = work.prefill_tokens
        taken_ms = 4.209989e-07 * prefill**2 + 1.518344e-02 * prefill + 16.50142 if prefill else 0.0
        return taken_ms / 1e3 + (self.decode_s(work, 1) if work.decode_seqs else 0.0)

    def decode_s(self, work: StepWork, steps: int) -> float:
        first, more = work.context_tokens / self.cache_tokens, work.decode_seqs / self.cache_tokens
        sum_of_steps, sum_of_squares = steps * (steps - 1) / 2, (steps - 1) * steps * (2 * steps - 1) / 6
        shares = steps * first + more * sum_of_steps
        squares = steps * first**2 + 2 * first * more * sum_of_steps + more**2 * sum_of_squares
        return (-25.74 * squares + 54.01 * shares + 5.74 * steps) / 1e3


# A simulated worker: the mocker's scheduler, driven by events.

_LONGEST_PIN_S = 60.0


@dataclass(eq=False, slots=True)
class _Live:
    served: Served
    sequence: Counted
    last_token_at: float = 0.0
    admitted_at: float = math.inf
    before: int = 0
    """Tokens that it had drawn elsewhere."""
    warms: Callable[[], None] | None = None
    """For a request that fetches KV for another one: called when the KV is there."""

    @property
    def to_compute(self) -> int:
        """Tokens of its prompt that were not cached."""
        return self.sequence.prompt_tokens - (self.sequence.cached_tokens or 0)


@dataclass(eq=False, slots=True)
class _Run:
    """Equal steps under way: when the first began, their work, and how many there are at most."""

    begun_at: float
    outcome: StepOutcome
    work: StepWork
    steps: int


@dataclass(frozen=True)
class Watcher:
    """Who is told what happens at workers."""

    first_token: Callable[[Served], None]
    ended: Callable[[Served], None]
    cache_changed: Callable[[str, CacheChanges], None]


class Worker:
    """Runs requests. `source_of`: finds another worker by its name, for pulls."""

    def __init__(
        self, name: str, settings: MockerSettings, timing: Timing, agenda: Agenda, watcher: Watcher, gaps: Gaps
    ) -> None:
        self.name = name
        self.scheduler = Scheduler(settings, contents=False)
        self._settings = settings
        self._timing = timing
        self._agenda = agenda
        self._watcher = watcher
        self._gaps = gaps
        self._lives: dict[Sequence, _Live] = {}
        self._run: _Run | None = None
        self._begins = False
        self._line_free_at = 0.0
        self._sources: dict[Sequence, Worker] = {}
        self._after_step: list[Callable[[], None]] = []
        self._meter = RateMeter()
        self.recomputed_tokens = 0
        """Contexts given up by preemptions, all together."""

    def submit(self, served: Served, source: Worker | None = None) -> None:
        """Take a request, which pulls from `source` what that has more of."""
        self._enter(_Live(served, self._counted(served.arrival, served.at)), source)

    def warm(self, served: Served, source: Worker, then: Callable[[], None]) -> None:
        """Fetch the KV of what a request has so far, and call `then`."""
        so_far = self._counted(_continued(served, 1), served.at)
        self._enter(_Live(served, so_far, warms=then), source)

    def take_over(self, served: Served, last_token_at: float) -> None:
        """Go on with a request that has drawn tokens elsewhere."""
        rest = _continued(served, served.arrival.output_tokens - served.drawn)
        self._enter(_Live(served, self._counted(rest, served.at), last_token_at, before=served.drawn), None)

    def give_up(self, served: Served) -> float | None:
        """Forget a request that runs, between two steps. Return when its last token came; None if it does not run."""
        live = next((live for live in self.decoding() if live.served is served), None)
        if live is None:
            return None
        self.scheduler.cancel(live.sequence)
        del self._lives[live.sequence]
        self._interrupt()
        return live.last_token_at

    def decoding(self) -> list[_Live]:
        """Requests that run and have a token."""
        lives = [self._lives[sequence] for sequence in self.scheduler.running]
        return [live for live in lives if live.served.drawn and live.warms is None]

    def after_step(self, action: Callable[[], None]) -> None:
        """Do something as soon as no step is under way."""
        if self._run is None:
            action()
        else:
            self._after_step.append(action)
            self._interrupt()

    @property
    def load(self) -> Load:
        """What a worker would report now."""
        running = set(self.scheduler.running)
        waiting = [live.sequence for live in self._lives.values() if live.sequence not in running]
        head = min(waiting, key=lambda sequence: sequence.claim, default=None)
        return msgspec.structs.replace(
            self.scheduler.load,
            at=self._agenda.now,
            head_tokens=0 if head is None else head.length,
            head_priority=None if head is None else head.claim.priority,
            by_class=_by_class(running),
            preempted_tokens=sum(sequence.length for sequence in waiting if sequence.drawn),
            recomputed_tokens=self.recomputed_tokens,
            rates=self._meter.rates,
        )

    def _counted(self, arrival: Arrival, at: float) -> Counted:
        return counted(arrival, at, self._settings.mocker_block_size, self._settings.context_limit)

    def _enter(self, live: _Live, source: Worker | None) -> None:
        if source is not None and source is not self:
            self._plan_pull(live.sequence, source)
        self._lives[live.sequence] = live
        self.scheduler.enter(live.sequence)
        self._interrupt()

    @property
    def step_ends_at(self) -> float:
        """When all that is computed now has been written: at the end of the step under way."""
        run = self._run
        return self._agenda.now if run is None else run.begun_at + self._took_s(run.work, self._steps_begun(run))

    def _plan_pull(self, sequence: Counted, source: Worker) -> None:
        full = (sequence.length - 1) // self._settings.mocker_block_size
        hashes = sequence.hashes(full, self._settings.mocker_block_size)
        blocks = source.scheduler.pool.match(hashes)
        name = Key("pin", f"{self.name} {sequence.claim.number}")
        until = self._agenda.now + _LONGEST_PIN_S
        if blocks and source.scheduler.leases.take(name, blocks, until) is None:
            sequence.pull = Pull("", tuple(blocks), 0, until)
            self._sources[sequence] = source

    def _interrupt(self) -> None:
        """Something has changed: look at it when the step under way ends."""
        run = self._run
        if run is None:
            self._begin_soon()
        elif run.steps > 1:
            steps = self._steps_begun(run)
            if steps < run.steps:
                self._start(_Run(run.begun_at, run.outcome, run.work, steps))

    def _steps_begun(self, run: _Run) -> int:
        """Number of its steps that have begun, the one under way among them."""
        passed = self._agenda.now - run.begun_at
        ends = range(1, run.steps)
        return 1 + bisect_left(ends, passed, key=lambda count: self._took_s(run.work, count))

    def _took_s(self, work: StepWork, steps: int) -> float:
        return self._timing.step_s(work) if steps == 1 else self._timing.decode_s(work, steps)

    def _begin_soon(self) -> None:
        if not self._begins:
            self._begins = True
            self._agenda.at(self._agenda.now, self._begin, late=True)

    def _begin(self) -> None:
        self._begins = False
        if self._run is not None or not self.scheduler.has_work:
            return
        now = self._agenda.now
        self.scheduler.leases.expire(now)
        outcome = self.scheduler.begin(now)
        for read in outcome.reads:
            self._read(read)
        for preempted in outcome.preempted:
            self._lives[preempted].served.preempted += 1
            self.recomputed_tokens += preempted.length
        for admitted in outcome.admitted:
            live = self._lives[admitted]
            live.admitted_at = min(live.admitted_at, now)
            self._note_cached(live)
        self._end_needless_pins(outcome)
        if outcome.computed:
            steps = 1 + alike(self.scheduler, outcome, self._settings.mocker_block_size)
            self._start(_Run(now, outcome, work_of(outcome), steps))
        elif outcome.reads:
            self._begin_soon()

    def _start(self, run: _Run) -> None:
        self._run = run
        ends_at = run.begun_at + self._took_s(run.work, run.steps)
        self._agenda.at(max(ends_at, self._agenda.now), lambda: self._end(run))

    def _end(self, run: _Run) -> None:
        if self._run is not run:
            return
        self._run = None
        self.scheduler.complete(run.outcome, self._agenda.now)
        lives = [self._lives[sequence] for sequence in run.outcome.emitted]
        if run.steps > 1:
            repeat([live.sequence for live in lives], run.steps - 1)
        self._measure(run, lives)
        for live in lives:
            self._drawn(live, run.steps)
        self._tell_changes()
        actions, self._after_step = self._after_step, []
        for action in actions:
            action()
        self._begin_soon()

    def _measure(self, run: _Run, lives: Iterable[_Live]) -> None:
        """Measure the engine by a run that ends now."""
        now = self._agenda.now
        if run.work.prefill_tokens == 0:
            self._meter.decoded((now - run.begun_at) / run.steps, run.work.decode_seqs, run.steps)
        begun = [live for live in lives if live.served.drawn == 0]
        self._meter.begun(now, [(live.admitted_at, live.to_compute) for live in begun])
        for live in lives:
            if live.sequence.finish is not None and live.warms is None:
                self._meter.ended(now - live.admitted_at)

    def _drawn(self, live: _Live, steps: int) -> None:
        served, now = live.served, self._agenda.now
        if live.warms is not None:
            del self._lives[live.sequence]
            live.warms()
            return
        if served.drawn == 0:
            self._watcher.first_token(served)
        else:
            self._gaps.add((now - live.last_token_at) / steps, steps)
            served.longest_gap_s = max(served.longest_gap_s, (now - live.last_token_at) / steps)
        live.last_token_at = now
        served.drawn = live.before + live.sequence.drawn
        if live.sequence.finish is not None:
            del self._lives[live.sequence]
            self._watcher.ended(served)

    def _note_cached(self, live: _Live) -> None:
        if live.warms is None and live.served.drawn == 0 and live.served.preempted == 0:
            live.served.cached = (live.sequence.cached_tokens or 0) - live.served.pulled

    def _read(self, read: Read) -> None:
        """Reads share one line. What the source is writing now is read once it is written."""
        source = self._sources[read.sequence]
        begins = max(self._agenda.now, self._line_free_at)
        ends = max(begins + self._settings.transfer_s(len(read.targets)), source.step_ends_at)
        self._line_free_at = ends
        if self._lives[read.sequence].warms is None:
            self._lives[read.sequence].served.pulled = len(read.targets) * self._settings.mocker_block_size
        self._agenda.at(ends, lambda: self._end_read(read))

    def _end_read(self, read: Read) -> None:
        received = self._agenda.now < read.pull.until
        if not received and self._lives[read.sequence].warms is None:
            self._lives[read.sequence].served.pulled = 0
        self.scheduler.end_read(read, received)
        self._end_pin(read.sequence)
        self._interrupt()

    def _end_needless_pins(self, outcome: StepOutcome) -> None:
        """End the pins of requests that have begun without a read."""
        for admitted in outcome.admitted:
            if admitted in self._sources:
                self._end_pin(admitted)

    def _end_pin(self, sequence: Sequence) -> None:
        source = self._sources.pop(sequence, None)
        if source is not None:
            source.scheduler.leases.end(Key("pin", f"{self.name} {sequence.claim.number}"))
            source._interrupt()

    def _tell_changes(self) -> None:
        changes = self.scheduler.pool.log.take()
        if changes is not None:
            self._watcher.cache_changed(self.name, changes)


def _continued(served: Served, output_tokens: int) -> Arrival:
    """The request with all that it has drawn as its prompt. Its blocks have the same keys."""
    tokens = served.arrival.prompt_tokens + served.drawn
    return replace(served.arrival, prompt_tokens=tokens, output_tokens=output_tokens, then=None)


def _by_class(running: Iterable[Sequence]) -> tuple[ClassUsage, ...]:
    requests, tokens = Counter[PriorityClass](), Counter[PriorityClass]()
    for sequence in running:
        one = class_of(sequence.claim.priority)
        requests[one] += 1
        tokens[one] += sequence.length
    return tuple(ClassUsage(one, requests[one], tokens[one]) for one in PriorityClass if requests[one])


# Steps in which nothing changes but that each running request draws a token: done at once.


def alike(scheduler: Scheduler, outcome: StepOutcome, block_size: int) -> int:
    """Count the steps after this one, which has begun, that do the same: each request draws a token that is neither its
    first nor its last one, in a block that it has and does not fill. Requests that wait cannot begin meanwhile. None if
    blocks have left the cache for this step: that is told when it ends."""
    if not scheduler.pool.log.is_empty:
        return 0
    if outcome.admitted or outcome.preempted or outcome.reads or len(outcome.emitted) < len(scheduler.running):
        return 0
    steps = math.inf
    for sequence in outcome.emitted:
        if outcome.computed[sequence] > 1 or not sequence.drawn:
            return 0
        steps = min(steps, _alike(sequence, block_size))
    return max(int(steps), 0) if outcome.emitted else 0


def repeat(decoding: Iterable[Counted], steps: int) -> None:
    """Do that many steps more, of those that `alike` has told, once the first one is complete."""
    for sequence in decoding:
        sequence.computed += steps
        sequence.draw_all(steps)


def _alike(sequence: Sequence, block_size: int) -> int:
    computed = sequence.computed
    in_block = min(len(sequence.blocks) * block_size - computed, block_size - 1 - computed % block_size)
    return min(in_block, sequence.end - sequence.length - 2)
