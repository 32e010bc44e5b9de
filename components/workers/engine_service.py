"""A worker's duty: take submissions from the bus, put them to the engine, send every step's tokens back.

Each step makes one message for each frontend concerned. A worker knows nothing of a request but its engine state, who
asked for it, and the tokens that the frontend has not acknowledged yet. What it sends is stamped with request, epoch
and position, and the frontend judges it.
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
from components.workers.kv_puller import KvPuller
from components.workers.kv_source import KvSource
from components.workers.migration_target import MigrationTarget
from components.workers.requests.admission import Admission
from components.workers.requests.counters import Counters
from components.workers.requests.epoch_events import EpochEvents, EpochListener
from components.workers.requests.frontend_liveness import GRACE_S, FrontendLiveness
from components.workers.requests.queue_head import QueueHead
from components.workers.requests.sender import TokenSender, error_delta
from components.workers.requests.unacknowledged import TELL_AGAIN_S, Unacknowledged
from components.workers.stalls import StallWatch
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core.beats import until_beat
from dynamo_local.core.fleet.view import Change, Happened
from dynamo_local.core.messages.kv import Unpin
from dynamo_local.core.messages.presence import Load
from dynamo_local.core.messages.tokens import Fault, TokenDelta
from dynamo_local.core.messages.work import Ack, AskExclusive, Cancel, EndExclusive, RequestEpoch, Resend, Submit, Work
from dynamo_local.core.ports import Engine, Step
from dynamo_local.core.request.outbox import Outbox
from dynamo_local.process.context import ServiceContext

_log = logging.getLogger(__name__)

_LAST_WORDS_S = 2.0
"""How long a worker that has drained waits for its last tokens to be acknowledged."""

_LOOK_EVERY_S = 1.0


class EngineService:
    """Joins one engine to the bus."""

    def __init__(
        self,
        context: ServiceContext,
        engine: Engine,
        *,
        stall_s: float = 120.0,
        frontend_grace_s: float = GRACE_S,
        tell_again_s: float = TELL_AGAIN_S,
    ) -> None:
        self._context = context
        self._engine = engine
        self._stalls = StallWatch(context.announcer, engine, stall_s)
        self._absences = FrontendLiveness(context.tasks, frontend_grace_s, self._forget_frontend)
        self._outbox = Outbox()
        self._unacknowledged = Unacknowledged(self._outbox, self._drop, self._publish, tell_again_s)
        self._tally = Counters()
        self._queue_head = QueueHead()
        self._sender = TokenSender(context)
        self._puller = KvPuller(context, engine)
        self._lender = KvSource(context, engine)
        self._intake = Admission(context.tasks, engine, self._puller, self._is_open, self._reject)
        self._watches = EpochEvents()
        self._reception = MigrationTarget(
            context, engine, self._puller, self._watches, lambda: len(self._outbox.running())
        )
        self._exclusivity = Exclusivity(context.announcer, self._outbox.running, self._reception.is_warming)
        self._fleet = FleetWatch(context.bus, context.subjects)
        self._draining = False
        self.abandoned = False
        """The engine, or what serves it, has failed: nothing under way can finish."""
        self._on_duty: list[asyncio.Task[None]] = []
        """What serves the engine, from its start to its end."""
        self._stepped_at = time.monotonic()
        self._changed = asyncio.Event()
        """Something has finished or been forgotten."""

    async def start(self) -> None:
        """Take work from now on."""
        context = self._context
        context.tasks.on_failure(lambda _: self._abandon())
        self._fleet.subscribe(self._on_fleet_change)
        await self._fleet.start()
        context.tasks.spawn("fleet", self._fleet.run())
        context.announcer.note(counts=self._tally.counts)
        self._tell_idle()
        self._on_duty = [
            context.tasks.spawn("steps", self._pump()),
            context.tasks.spawn("stalls", self._watch()),
            context.tasks.spawn("ends", self._tidy()),
        ]
        await self._lender.start()
        await self._reception.start()
        await context.bus.listen(context.subjects.work(context.lease), Work, self._on_work)

    async def drain(self, deadline_s: float) -> None:
        """Refuse new work and let the requests under way finish; those that do not may continue elsewhere. What has
        been prefilled for others is kept until they have it."""
        self._draining = True
        self._reception.close()
        await self._until(lambda: not self._outbox.running() and not self._outbox.held(), deadline_s)
        left = self._outbox.running()
        if left:
            _log.warning("%d requests were still under way after %g s", len(left), deadline_s)
        if held := self._outbox.held():
            _log.warning("%d prefills had not been fetched after %g s", len(held), deadline_s)
        await self._drop(list(left))
        for request, frontend in left.items():
            await self._answer(request, frontend, "the worker was shut down", refused=True)
        await self._until(lambda: len(self._outbox) == 0, _LAST_WORDS_S)

    def stop(self) -> None:
        """Leave the engine alone: it is about to be closed."""
        for task in self._on_duty:
            task.cancel()

    def _abandon(self) -> None:
        """Know of no request any more. Frontends have them go on elsewhere as soon as they hear that this worker has
        failed; who does not hear of it asks, and is refused."""
        self.abandoned = self._draining = True
        self._reception.close()
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
                await self._engine.unpin(work.pins)
            case AskExclusive():
                self._exclusivity.ask(work)
            case EndExclusive():
                self._exclusivity.end(work)

    async def take(self, work: Submit) -> EpochListener:
        """Take a request that did not come over the bus. Tells what becomes of it."""
        request = RequestEpoch(work.request_id, work.epoch)
        watch = self._watches.add(request)
        await self._take(work)
        if self._outbox.get(request) is None:
            self._watches.forgotten([request])
        return watch

    async def _take(self, work: Submit) -> None:
        request = RequestEpoch(work.request_id, work.epoch)
        why_not = "the worker is draining" if self._draining else self._exclusivity.refuses(work)
        if why_not is not None:
            await self._answer(request, work.frontend, why_not, refused=True)
            return
        if not self._outbox.open(request, work.frontend, work.position, held=work.hold_s > 0):
            return
        self._tally.taken(request, len(work.token_ids))
        self._queue_head.taken(work)
        warm = self._reception.arrived(work)
        if len(self._outbox.running()) == 1:
            # A stall is counted from the moment at which there is something to do.
            self._stepped_at = time.monotonic()
        await self._intake.take(work, warm)

    async def _reject(
        self, request: RequestEpoch, frontend: str, why: str, *, refused: bool = False, fault: Fault | None = None
    ) -> None:
        self._forget([request])
        await self._puller.done([request])
        await self._answer(request, frontend, why, refused=refused, fault=fault)

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
        await self._publish(question.frontend, time.monotonic(), tuple(deltas))

    async def _drop(self, requests: list[RequestEpoch]) -> None:
        left = self._forget(requests)
        if left:
            await self._engine.cancel(left)
        await self._puller.done(requests)

    def _forget(self, requests: list[RequestEpoch]) -> list[RequestEpoch]:
        """Returns those of which the engine still has something."""
        left = self._outbox.forget(requests)
        self._tally.forgotten(requests)
        self._queue_head.forgotten(requests)
        self._watches.forgotten(requests)
        self._exclusivity.look()
        self._changed.set()
        return left

    # Frontends

    def _on_fleet_change(self, change: Change) -> None:
        lease = change.presence.lease
        concerned = self._outbox.of_frontend(lease) or self._reception.has_guests_of(lease)
        if change.what is Happened.LEFT:
            self._puller.lost(lease)
            if concerned:
                self._absences.begin(lease)
        elif change.what is Happened.APPEARED:
            self._absences.end(lease)

    async def _forget_frontend(self, frontend: str) -> None:
        """A frontend that is gone wants nothing any more; one that was only unheard asks, and is refused then."""
        orphans = self._outbox.of_frontend(frontend)
        _log.warning("dropping %d requests of a frontend that is gone", len(orphans))
        await self._drop(orphans)
        await self._reception.forget(frontend)
        self._sender.forget(frontend)

    # Tokens

    async def _pump(self) -> None:
        while True:
            step = await self._engine.step()
            self._stepped_at = time.monotonic()
            self._tally.computed(step.deltas)
            self._queue_head.stepped(step.deltas)
            self._context.announcer.note(load=self._load(step), counts=self._tally.counts)
            await self._send(step)

    def _load(self, step: Step) -> Load | None:
        """As the worker tells it, if the step came with one."""
        if step.load is None:
            return None
        load = self._reception.without_guests(step.load)
        return msgspec.structs.replace(load, at=step.timestamp, head_tokens=self._queue_head.tokens(load.waiting))

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
                self._watches.computed(request)
        for frontend, theirs in by_frontend.items():
            await self._publish(frontend, step.timestamp, tuple(theirs))
        # With its first token, a request has read what it wanted to.
        await self._puller.done(begun)
        await self._reception.begun(begun)
        self._exclusivity.look()
        self._changed.set()

    async def _answer(
        self, request: RequestEpoch, frontend: str, why: str, *, refused: bool = False, fault: Fault | None = None
    ) -> None:
        await self._publish(frontend, time.monotonic(), (error_delta(request, why, refused=refused, fault=fault),))

    async def _publish(self, frontend: str, timestamp: float, deltas: tuple[TokenDelta, ...]) -> None:
        too_large = await self._sender.send(frontend, timestamp, deltas)
        if too_large:
            await self._drop(too_large)

    # Time

    async def _tidy(self) -> None:
        """Forget requests whose end nobody wants to hear, and guests that do not come. It may have to wait for the
        engine."""
        while True:
            await asyncio.sleep(until_beat(time.monotonic(), _LOOK_EVERY_S))
            now = time.monotonic()
            await self._unacknowledged.look(now)
            await self._reception.expire(now)

    async def _watch(self) -> None:
        """Notice an engine that hangs, and one with nothing to do. Raises EngineError."""
        while True:
            await asyncio.sleep(until_beat(time.monotonic(), _LOOK_EVERY_S))
            await self._stalls.look(time.monotonic(), self._stepped_at, running=bool(self._outbox.running()))
            self._tell_idle()
            self._exclusivity.look()

    def _tell_idle(self) -> None:
        """An engine without requests makes no steps, and so tells no load; that it has none is known here."""
        if self._outbox.running():
            return
        load = self._context.announcer.presence.load or Load()
        if load.running != 0 or load.waiting != 0:
            # It has never told any, or makes no step for requests that were cancelled.
            load = Load(0, 0, 0.0, load.kv_pinned, head_tokens=0)
        self._context.announcer.note(load=msgspec.structs.replace(load, at=time.monotonic()))

    async def _until(self, condition: Callable[[], bool], deadline_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
