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

from components.workers.lender import Lender
from components.workers.puller import PrefixPuller
from components.workers.sender import TokenSender, error_delta
from components.workers.watches import EpochWatch, EpochWatches
from dynamo_local.core import codec
from dynamo_local.core.errors import DecodeError, EngineError, RequestError
from dynamo_local.core.fleet import Change, Happened
from dynamo_local.core.messages import Ack, Cancel, RequestEpoch, Resend, Submit, TokenDelta, Unpin, Work
from dynamo_local.core.outbox import Outbox
from dynamo_local.core.ports import Engine, PulledPrefix, Step
from dynamo_local.runtime.bus import Message
from dynamo_local.runtime.context import ServiceContext
from dynamo_local.runtime.presence import FleetWatch

_log = logging.getLogger(__name__)

FRONTEND_GRACE_S = 8.0
"""How long a frontend may be unheard before its requests are dropped. (Its own workers it gives 2 s: they can be
replaced, it cannot.)"""

UNACKNOWLEDGED_S = 60.0
"""How long the end of a request is kept for a frontend that is there and does not ask for it."""

_LAST_WORDS_S = 2.0
"""How long a worker that has drained waits for its last tokens to be acknowledged."""

_LOOK_EVERY_S = 1.0


class EngineDuty:
    """Joins one engine to the bus."""

    def __init__(
        self,
        context: ServiceContext,
        engine: Engine,
        *,
        stall_s: float = 120.0,
        frontend_grace_s: float = FRONTEND_GRACE_S,
    ) -> None:
        self._context = context
        self._engine = engine
        self._stall_s = stall_s
        self._frontend_grace_s = frontend_grace_s
        self._outbox = Outbox()
        self._sender = TokenSender(context)
        self._puller = PrefixPuller(context, engine)
        self._lender = Lender(context, engine)
        self._watches = EpochWatches()
        self._fleet = FleetWatch(context.bus, context.subjects)
        self._draining = False
        self._stepped_at = time.monotonic()
        self._changed = asyncio.Event()
        """Something has finished or been forgotten."""

    async def start(self) -> None:
        """Take work from now on."""
        context = self._context
        self._fleet.subscribe(self._on_fleet_change)
        await self._fleet.start()
        context.tasks.spawn("fleet", self._fleet.run())
        context.tasks.spawn("steps", self._pump())
        context.tasks.spawn("stalls", self._watch())
        await self._lender.start()
        await context.bus.subscribe(context.subjects.work(context.lease), self._on_work)

    async def drain(self, deadline_s: float) -> None:
        """Refuse new work and let the requests under way finish; those that do not may continue elsewhere. What has
        been prefilled for others is kept until they have it."""
        self._draining = True
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

    # Work

    async def _on_work(self, message: Message) -> None:
        try:
            work: Work = codec.decode(message.data, Work)
        except DecodeError as error:
            _log.warning("work refused: %s", error)
            return
        match work:
            case Submit():
                await self._take(work)
            case Cancel():
                await self._drop(list(work.requests))
            case Ack():
                self._trim(work)
            case Resend():
                await self._send_again(work)
            case Unpin():
                await self._engine.unpin(work.pins)

    async def take(self, work: Submit) -> EpochWatch:
        """Take a request that did not come over the bus. Tells what becomes of it."""
        request = RequestEpoch(work.request_id, work.epoch)
        watch = self._watches.add(request)
        await self._take(work)
        if self._outbox.get(request) is None:
            self._watches.forgotten([request])
        return watch

    async def _take(self, work: Submit) -> None:
        request = RequestEpoch(work.request_id, work.epoch)
        if self._draining:
            await self._answer(request, work.frontend, "the worker is draining", refused=True)
            return
        if not self._outbox.open(request, work.frontend, work.position, held=work.hold_s > 0):
            return
        if len(self._outbox.running()) == 1:
            # A stall is counted from the moment at which there is something to do.
            self._stepped_at = time.monotonic()
        if work.source is None:
            await self._put(work, None)
        else:
            # Not awaited: others are not to wait while the source is asked.
            self._context.tasks.spawn(f"pull {request}", self._pull_and_put(work, work.source))

    async def _pull_and_put(self, work: Submit, source: str) -> None:
        request = RequestEpoch(work.request_id, work.epoch)
        pulled = await self._puller.pull(work, source)
        if self._outbox.get(request) is None:
            # Cancelled meanwhile.
            await self._puller.done([request])
            return
        await self._put(work, pulled)

    async def _put(self, work: Submit, pulled: PulledPrefix | None) -> None:
        request = RequestEpoch(work.request_id, work.epoch)
        try:
            await self._engine.submit(work, pulled)
        except RequestError as error:
            await self._reject(request, work.frontend, str(error))
        except EngineError as error:
            # This process is about to end for it; another one may take the request.
            await self._reject(request, work.frontend, str(error), refused=True)
        except Exception:  # noqa: BLE001
            # The boundary of a request: it fails alone, and its client is told.
            _log.exception("request %s could not be put to the engine", request)
            await self._reject(request, work.frontend, "the engine could not take the request")
        else:
            if self._outbox.get(request) is None:
                # Cancelled while the engine, which did not know it then, was taking it.
                await self._engine.cancel([request])

    async def _reject(self, request: RequestEpoch, frontend: str, why: str, *, refused: bool = False) -> None:
        self._forget([request])
        await self._puller.done([request])
        await self._answer(request, frontend, why, refused=refused)

    def _trim(self, ack: Ack) -> None:
        for progress in ack.progress:
            kept = self._outbox.get(RequestEpoch(progress.request_id, progress.epoch))
            if kept is not None:
                kept.trim(progress.position)

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
        self._watches.forgotten(requests)
        self._changed.set()
        return left

    # Frontends

    def _on_fleet_change(self, change: Change) -> None:
        if change.what is Happened.LEFT and self._outbox.of_frontend(change.presence.lease):
            self._context.tasks.spawn("frontend gone", self._drop_unless_back(change.presence.lease))

    async def _drop_unless_back(self, frontend: str) -> None:
        """A frontend that is gone wants nothing any more; one that was only unheard asks, and is refused then."""
        await asyncio.sleep(self._frontend_grace_s)
        if self._fleet.view.get(frontend) is None:
            orphans = self._outbox.of_frontend(frontend)
            _log.warning("dropping %d requests of a frontend that is gone", len(orphans))
            await self._drop(orphans)
            self._sender.forget(frontend)

    # Tokens

    async def _pump(self) -> None:
        while True:
            step = await self._engine.step()
            self._stepped_at = time.monotonic()
            if step.load is not None:
                self._context.announcer.observe_load(step.load)
            await self._send(step)

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
        self._changed.set()

    async def _answer(self, request: RequestEpoch, frontend: str, why: str, *, refused: bool = False) -> None:
        await self._publish(frontend, time.monotonic(), (error_delta(request, why, refused=refused),))

    async def _publish(self, frontend: str, timestamp: float, deltas: tuple[TokenDelta, ...]) -> None:
        too_large = await self._sender.send(frontend, timestamp, deltas)
        if too_large:
            await self._drop(too_large)

    # Time

    async def _watch(self) -> None:
        """Notice an engine that hangs, and requests whose end nobody wants to hear. Raises EngineError."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            now = time.monotonic()
            await self._drop(self._outbox.finished_before(now - UNACKNOWLEDGED_S))
            if self._outbox.running() and now - self._stepped_at > self._stall_s:
                raise EngineError(f"the engine has made no step for {self._stall_s:g} s, with requests to work on")

    async def _until(self, condition: Callable[[], bool], deadline_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
