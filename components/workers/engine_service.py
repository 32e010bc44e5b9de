"""Serves an engine on the bus: requests are submitted to the engine, and the tokens of each step sent to frontends.

Each step makes one message for each frontend concerned. A worker keeps nothing of a request but its engine state, its
frontend, and the tokens that the frontend has not acknowledged yet. Tokens carry request, epoch and position; the
frontend decides by these which of them it accepts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress

import msgspec

from components.workers.exclusivity import Exclusivity
from components.workers.kv_events import KvPublisher
from components.workers.kv_puller import KvPuller
from components.workers.kv_source import KvSource
from components.workers.migration_target import MigrationTarget
from components.workers.parking import Parking
from components.workers.requests.admission import Admission, QueueHead
from components.workers.requests.counters import Counters, EpochEvents, EpochListener, StepMeter
from components.workers.requests.sender import (
    GRACE_S,
    RESEND_AFTER_S,
    FrontendLiveness,
    TokenSender,
    Unacknowledged,
    error_delta,
)
from components.workers.warming import DEFAULT_SHARE, HotPrefixWarmUp, WarmRequests
from dynamo_local.bus.presence import Announcer, FleetWatch
from dynamo_local.core.beats import until_beat
from dynamo_local.core.errors import EngineError
from dynamo_local.core.fleet.view import Change, Happened
from dynamo_local.core.messages.endpoints import adapter_name
from dynamo_local.core.messages.kv import Unpin
from dynamo_local.core.messages.presence import LeaseLost, Load
from dynamo_local.core.messages.work import (
    Ack,
    AskExclusive,
    Cancel,
    EndExclusive,
    Fault,
    RequestEpoch,
    Resend,
    Submit,
    TokenDelta,
    Work,
)
from dynamo_local.core.ports import Engine, Step
from dynamo_local.core.process.stalls import StallClock, Verdict
from dynamo_local.core.request.log import Outbox
from dynamo_local.process.context import ServiceContext

_log = logging.getLogger(__name__)

_ACKNOWLEDGED_WITHIN_S = 2.0
"""How long a drained worker waits for frontends to acknowledge the last tokens."""

_FAILED_ADAPTERS = 50
"""Most adapters that cannot be loaded of which a worker tells, the newest ones."""

_LOOK_EVERY_S = 1.0
"""Interval of the checks for stalls and for expired requests."""


class EngineService:
    """Serves one engine: submissions, migrations, KV pulls, and the load that the worker announces."""

    def __init__(
        self,
        context: ServiceContext,
        engine: Engine,
        *,
        stall_s: float = 120.0,
        frontend_grace_s: float = GRACE_S,
        resend_after_s: float = RESEND_AFTER_S,
        hot_prefix_share: float = DEFAULT_SHARE,
    ) -> None:
        self._context = context
        self._engine = engine
        self.parking = Parking(context.announcer, engine)
        self._stalls = StallWatch(context.announcer, engine, stall_s)
        self._frontend_liveness = FrontendLiveness(context.tasks, frontend_grace_s, self._forget_frontend)
        self._outbox = Outbox()
        self._unacknowledged = Unacknowledged(self._outbox, self._drop, self._publish, resend_after_s)
        self._counters = Counters()
        self._step_meter = StepMeter()
        self._queue_head = QueueHead()
        self._sender = TokenSender(context)
        self._kv_puller = KvPuller(context, engine)
        self._kv_publisher = KvPublisher(context)
        self._kv_source = KvSource(context, engine, self._is_parked)
        self._admission = Admission(
            context.tasks, engine, self._kv_puller, self._is_open, self._reject, self._note_adapter
        )
        self._epoch_events = EpochEvents()
        self._warm_requests = WarmRequests(engine, self._kv_puller, self._epoch_events)
        self._migration_target = MigrationTarget(
            context,
            engine,
            self._warm_requests,
            running=lambda: len(self._outbox.running()),
            is_parked=self._is_parked,
        )
        self._warm_up = HotPrefixWarmUp(
            context,
            engine,
            self._warm_requests,
            cached_blocks=lambda: self._kv_publisher.cached_blocks,
            is_parked=self._is_parked,
            share=hot_prefix_share,
        )
        self._exclusivity = Exclusivity(context.announcer, self._outbox.running, self._warm_requests.are_running)
        self._fleet = FleetWatch(context.bus, context.subjects, frontends_alone=True)
        self._draining = False
        self.abandoned = False
        """The engine or one of this service's tasks has failed: no request under way can finish."""
        self._engine_tasks: list[asyncio.Task[None]] = []
        """The tasks that need a running engine."""
        self._stepped_at = time.monotonic()
        self._changed = asyncio.Event()
        """Set whenever a request has finished or been forgotten; `drain` waits for it."""

    async def start(self) -> None:
        """Begin to take work. The engine must have been started."""
        context = self._context
        context.tasks.on_failure(lambda _: self._abandon())
        self._fleet.subscribe(self._on_fleet_change)
        self.parking.on_wake(self._awake)
        await self._fleet.start()
        context.tasks.spawn("fleet", self._fleet.run())
        context.announcer.note(counts=self._counters.counts)
        self._report_idle()
        self._engine_tasks = [
            context.tasks.spawn("steps", self._relay_steps()),
            context.tasks.spawn("stalls", self._watch_engine()),
            context.tasks.spawn("ends", self._expire()),
        ]
        await self._kv_source.start()
        await self._kv_publisher.start()
        await self._migration_target.start()
        await self._warm_up.start()
        await context.bus.listen(context.subjects.lost, LeaseLost, self._on_lost)
        await context.bus.listen(context.subjects.work(context.lease), Work, self._on_work)

    async def drain(self, deadline_s: float) -> None:
        """Refuse new work, and let the requests under way finish. Those unfinished after `deadline_s` are refused, so
        that their frontends continue them elsewhere. Finished prefills are kept until a decode worker has fetched
        them."""
        self._draining = True
        self._migration_target.close()
        self._warm_up.close()
        await self._until(lambda: not self._outbox.running() and not self._outbox.held(), deadline_s)
        left = self._outbox.running()
        if left:
            _log.warning(
                "%d requests were still under way after %g s of draining; their frontends continue them elsewhere",
                len(left),
                deadline_s,
            )
        if held := self._outbox.held():
            _log.warning(
                "%d finished prefills had not been fetched after %g s; their prompts are computed again",
                len(held),
                deadline_s,
            )
        await self._drop(list(left))
        for request, frontend in left.items():
            await self._send_error(request, frontend, "the worker was shut down", refused=True)
        await self._until(lambda: len(self._outbox) == 0, _ACKNOWLEDGED_WITHIN_S)

    def why_busy(self) -> str | None:
        """Say why the engine cannot pause; None if it can."""
        state = self._context.announcer.presence.state
        if self._draining or state != "ready":
            return f"the worker is {'draining' if self._draining else state}"
        if self._outbox.running() or self._admission.is_submitting:
            return "it has requests"
        if self._outbox.held():
            return "it keeps finished prefills that have not been fetched"
        if self._context.announcer.presence.exclusive is not None:
            return "it is set apart for one request"
        if self._warm_up.is_fetching():
            return "it brings prefixes from other workers"
        return "requests are to move to it" if self._migration_target.is_expecting() else None

    def _is_parked(self) -> bool:
        return self.parking.resting

    def _awake(self) -> None:
        # What waited for the engine has not been stalled by it.
        self._stepped_at = time.monotonic()
        self._report_idle()
        self._warm_up.begin()

    def stop(self) -> None:
        """Stop using the engine, which is about to be closed."""
        for task in self._engine_tasks:
            task.cancel()

    def _abandon(self) -> None:
        """Forget all requests. Frontends continue them elsewhere when they hear that this worker has failed; a frontend
        that misses the news asks for its tokens, and is refused."""
        self.abandoned = self._draining = True
        self._migration_target.close()
        self._warm_up.close()
        self._forget(self._outbox.all())

    # Work

    async def _on_work(self, work: Work) -> None:
        match work:
            case Submit():
                await self._take(work)
            case Cancel():
                await self._drop(list(work.requests))
            case Ack():
                self._outbox.trim(work.progress)
            case Resend():
                await self._send_again(work)
            case Unpin():
                await self._kv_source.unpin(work.pins)
            case AskExclusive():
                # Frontends ask routable workers; one that asks again finds another, or this one awake.
                if not self.parking.resting:
                    self._exclusivity.ask(work)
            case EndExclusive():
                self._exclusivity.end(work)

    async def take(self, work: Submit) -> EpochListener:
        """Take a request that came by another way than the bus, and report its events."""
        request = RequestEpoch(work.request_id, work.epoch)
        events = self._epoch_events.add(request)
        await self._take(work)
        if self._outbox.get(request) is None:
            self._epoch_events.forgotten([request])
        return events

    async def _take(self, work: Submit) -> None:
        request = RequestEpoch(work.request_id, work.epoch)
        why_not = "the worker is draining" if self._draining else self._exclusivity.refuses(work)
        if why_not is not None:
            await self._send_error(request, work.frontend, why_not, refused=True)
            return
        if not self._outbox.open(request, work.frontend, work.position, held=work.hold_s > 0):
            return
        self._counters.taken(request, len(work.token_ids))
        self._queue_head.taken(work)
        self._warm_up.taken(work)
        warm = self._migration_target.arrived(work)
        if len(self._outbox.running()) == 1:
            # An idle engine makes no steps: a stall is counted from the first request on.
            self._stepped_at = time.monotonic()
        if self.parking.resting:
            # Not awaited: other messages are not to wait.
            self._context.tasks.spawn(f"wake for {request}", self._wake_and_admit(request, work, warm))
        else:
            await self._admission.take(work, warm)

    async def _wake_and_admit(self, request: RequestEpoch, work: Submit, warm: RequestEpoch | None) -> None:
        await self.parking.wake()
        if self._is_open(request):
            await self._admission.take(work, warm)

    async def _reject(
        self, request: RequestEpoch, frontend: str, why: str, *, refused: bool = False, fault: Fault | None = None
    ) -> None:
        self._forget([request])
        await self._kv_puller.done([request])
        await self._send_error(request, frontend, why, refused=refused, fault=fault)

    def _note_adapter(self, key: str, why: str | None) -> None:
        """Announce that an adapter cannot be loaded; None: that it could. Former versions of it are forgotten."""
        failed = self._context.announcer.presence.failed_adapters
        if why is None and key not in failed:
            return
        others = {each: known for each, known in failed.items() if adapter_name(each) != adapter_name(key)}
        newest = dict(list(others.items())[1 - _FAILED_ADAPTERS :])
        self._context.announcer.update(failed_adapters=newest if why is None else {**newest, key: why})

    def _is_open(self, request: RequestEpoch) -> bool:
        return self._outbox.get(request) is not None

    async def _send_again(self, question: Resend) -> None:
        deltas: list[TokenDelta] = []
        for progress in question.progress:
            request = RequestEpoch(progress.request_id, progress.epoch)
            kept = self._outbox.get(request)
            if kept is None:
                deltas.append(error_delta(request, "the worker does not know the request", refused=True))
            else:
                deltas += kept.since(request, progress.position)
        await self._publish(question.frontend, tuple(deltas))

    async def _drop(self, requests: list[RequestEpoch]) -> None:
        left = self._forget(requests)
        if left:
            await self._engine.cancel(left)
        await self._kv_puller.done(requests)

    def _forget(self, requests: list[RequestEpoch]) -> list[RequestEpoch]:
        """Drop all that is kept of these requests. Returns those that the engine must be told to cancel."""
        left = self._outbox.forget(requests)
        self._counters.forgotten(requests)
        self._step_meter.forgotten(requests, time.monotonic())
        self._queue_head.forgotten(requests)
        self._epoch_events.forgotten(requests)
        self._exclusivity.look()
        self._changed.set()
        return left

    # Frontends

    def _on_fleet_change(self, change: Change) -> None:
        lease = change.presence.lease
        concerned = self._outbox.of_frontend(lease) or self._migration_target.has_reservations_of(lease)
        if change.what is Happened.LEFT and concerned:
            self._frontend_liveness.lost(lease)
        elif change.what is Happened.APPEARED:
            self._frontend_liveness.heard(lease)

    async def _on_lost(self, lost: LeaseLost) -> None:
        self._kv_puller.lost(lost.lease)

    async def _forget_frontend(self, frontend: str) -> None:
        """Drop the requests of a frontend that is gone. One that was only unheard asks for its tokens later, and is
        refused, so that it continues the requests elsewhere."""
        orphans = self._outbox.of_frontend(frontend)
        _log.warning("a frontend has ended or cannot be reached: its %d requests here are dropped", len(orphans))
        await self._drop(orphans)
        await self._migration_target.forget_frontend(frontend)
        self._sender.forget(frontend)

    # Tokens

    async def _relay_steps(self) -> None:
        while True:
            step = await self._engine.step()
            self._stepped_at = time.monotonic()
            self._step_meter.stepped(step, self._counters.computed(step.deltas))
            self._queue_head.stepped(step.deltas)
            self._kv_publisher.note(step.cache)
            load = None if self.parking.resting else self._load(step)
            self._context.announcer.note(load=load, counts=self._counters.counts)
            await self._send(step)

    def _load(self, step: Step) -> Load | None:
        """The load to announce: the engine's, without warm requests; None if the step came without one."""
        if step.load is None:
            return None
        load = self._warm_requests.without(step.load)
        load = msgspec.structs.replace(load, at=step.timestamp, rates=self._step_meter.rates(step.timestamp))
        return self._queue_head.completed(load, step.timestamp)

    async def _send(self, step: Step) -> None:
        by_frontend: defaultdict[str, list[TokenDelta]] = defaultdict(list)
        begun: list[RequestEpoch] = []
        for delta in step.deltas:
            request = RequestEpoch(delta.request_id, delta.epoch)
            begun.append(request)
            kept = self._outbox.get(request)
            if kept is not None:
                kept.add(delta, self._stepped_at)
                by_frontend[kept.frontend].append(delta)
            if delta.finish is not None:
                self._epoch_events.computed(request)
        for frontend, theirs in by_frontend.items():
            await self._publish(frontend, tuple(theirs))
        # A request computes its first token only when the blocks that it pulls have been read.
        await self._kv_puller.done(begun)
        await self._migration_target.begun(begun)
        self._exclusivity.look()
        self._changed.set()

    async def _send_error(
        self, request: RequestEpoch, frontend: str, why: str, *, refused: bool = False, fault: Fault | None = None
    ) -> None:
        await self._publish(frontend, (error_delta(request, why, refused=refused, fault=fault),))

    async def _publish(self, frontend: str, deltas: tuple[TokenDelta, ...]) -> None:
        too_large = await self._sender.send(frontend, deltas)
        if too_large:
            await self._drop(too_large)

    # Upkeep

    async def _expire(self) -> None:
        """Expire unacknowledged requests and reservations, until cancelled. A task of its own, because the engine may
        have to be waited for."""
        while True:
            await asyncio.sleep(until_beat(time.monotonic(), _LOOK_EVERY_S))
            now = time.monotonic()
            await self._unacknowledged.look(now)
            await self._migration_target.expire(now)

    async def _watch_engine(self) -> None:
        """Look after the engine until cancelled. Raises EngineError when it hangs."""
        while True:
            await asyncio.sleep(until_beat(time.monotonic(), _LOOK_EVERY_S))
            # A parked engine makes no steps, even while a request waits for it to wake.
            running = bool(self._outbox.running()) and not self.parking.resting
            await self._stalls.look(time.monotonic(), self._stepped_at, running=running)
            self._report_idle()
            self._exclusivity.look()

    def _report_idle(self) -> None:
        """Announce an empty load if no request is left: an engine without requests makes no steps, and reports none."""
        if self._outbox.running() or self.parking.resting:
            return
        load = self._context.announcer.presence.load or Load()
        if load.running != 0 or load.waiting != 0:
            # Either no step has been made yet, or the last requests were cancelled, for which no step is made.
            known = load.recomputed_tokens
            idle = Load(0, 0, 0.0, load.kv_pinned, head_tokens=0, by_class=(), preempted_tokens=0)
            load = msgspec.structs.replace(idle, recomputed_tokens=known)
        now = time.monotonic()
        self._context.announcer.note(load=msgspec.structs.replace(load, at=now, rates=self._step_meter.rates(now)))

    async def _until(self, condition: Callable[[], bool], deadline_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()


# Watches for stalls of an engine: a hung engine ends its worker, an engine starved of CPU time is reported.

STARVED = "its engine waits for CPU time that other processes have"
_LOOKED_AT_AFTER_S = 2.0
"""No engine is suspected that has made a step within this time."""
_LONGEST_LOOK_S = 2.0
"""Time counted between two looks at most. If more has passed, this process was starved, as the engine may have been."""


class StallWatch:
    """Watches one engine. It hangs if it has requests and a core, and makes no step for `limit_s`."""

    def __init__(self, announcer: Announcer, engine: Engine, limit_s: float) -> None:
        self._announcer = announcer
        self._engine = engine
        self._limit_s = limit_s
        self._clock = StallClock(limit_s, _LONGEST_LOOK_S)
        self._starved = False

    async def look(self, now: float, stepped_at: float, *, running: bool) -> None:
        """Judge the engine. To be called about once a second. Raises EngineError if the engine hangs."""
        verdict = Verdict.WELL
        if running and now - stepped_at > min(_LOOKED_AT_AFTER_S, self._limit_s):
            verdict = self._clock.look(now, stepped_at, await self._engine.waited_s())
        if verdict is Verdict.HUNG:
            raise EngineError(f"the engine has made no step for {self._limit_s:g} s, with requests to work on")
        self._tell(verdict is Verdict.STARVED)

    def _tell(self, starved: bool) -> None:
        if starved == self._starved:
            return
        self._starved = starved
        if starved:
            _log.warning("%s; it is not taken for hung", STARVED)
        self._announcer.update(detail=STARVED if starved else "")
