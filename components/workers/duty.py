"""A worker's duty: take submissions from the bus, put them to the engine, send every step's tokens back.

Each step makes one message for each frontend concerned. A worker knows nothing of a request but its engine state and
who asked for it; what it sends is stamped with request, epoch and position, and the frontend judges it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict

from dynamo_local.core import codec
from dynamo_local.core.errors import BusError, DecodeError, EngineError, RequestError
from dynamo_local.core.fleet import Change, Happened
from dynamo_local.core.messages import Cancel, RequestEpoch, Submit, TokenBatch, TokenDelta, Work
from dynamo_local.core.ports import Engine
from dynamo_local.runtime.bus import Message
from dynamo_local.runtime.context import ServiceContext
from dynamo_local.runtime.presence import FleetWatch

_log = logging.getLogger(__name__)


class EngineDuty:
    """Joins one engine to the bus."""

    def __init__(self, context: ServiceContext, engine: Engine) -> None:
        self._context = context
        self._engine = engine
        self._owners: dict[RequestEpoch, str] = {}
        self._sequence: Counter[str] = Counter()
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    async def start(self) -> None:
        """Take work from now on."""
        fleet = FleetWatch(self._context.bus, self._context.subjects)
        fleet.subscribe(self._on_fleet_change)
        await fleet.start()
        self._context.tasks.spawn("fleet", fleet.run())
        self._context.tasks.spawn("steps", self._pump())
        await self._context.bus.subscribe(self._context.subjects.work(self._context.lease), self._on_work)

    async def drain(self, deadline_s: float) -> None:
        """Refuse new work, let the requests under way finish, then fail those that did not."""
        self._draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), deadline_s)
        except TimeoutError:
            _log.warning("%d requests were still under way after %g s", len(self._owners), deadline_s)
        left = dict(self._owners)
        await self._drop(list(left))
        for request, frontend in left.items():
            await self._answer_error(request, frontend, "the worker was shut down before the answer was complete")

    # Work

    async def _on_work(self, message: Message) -> None:
        try:
            work: Work = codec.decode(message.data, Work)
        except DecodeError as error:
            _log.warning("work refused: %s", error)
            return
        if isinstance(work, Cancel):
            await self._drop(list(work.requests))
        else:
            await self._take(work)

    async def _take(self, work: Submit) -> None:
        request = RequestEpoch(work.request_id, work.epoch)
        if self._draining:
            await self._answer_error(request, work.frontend, "the worker is draining", refused=True)
            return
        self._owners[request] = work.frontend
        self._idle.clear()
        try:
            await self._engine.submit(work)
        except RequestError as error:
            self._forget(request)
            await self._answer_error(request, work.frontend, str(error))
        except EngineError as error:
            # This process is about to end for it; another one may take the request.
            self._forget(request)
            await self._answer_error(request, work.frontend, str(error), refused=True)
        except Exception:  # noqa: BLE001
            # The boundary of a request: it fails alone, and its client is told.
            _log.exception("request %s could not be put to the engine", request)
            self._forget(request)
            await self._answer_error(request, work.frontend, "the engine could not take the request")

    async def _drop(self, requests: list[RequestEpoch]) -> None:
        known = [request for request in requests if request in self._owners]
        for request in known:
            self._forget(request)
        if known:
            await self._engine.cancel(known)

    def _forget(self, request: RequestEpoch) -> None:
        self._owners.pop(request, None)
        if not self._owners:
            self._idle.set()

    def _on_fleet_change(self, change: Change) -> None:
        """A frontend that is gone wants nothing any more."""
        if change.what is Happened.LEFT:
            lease = change.presence.lease
            orphans = [request for request, owner in self._owners.items() if owner == lease]
            if orphans:
                _log.warning("dropping %d requests of a frontend that is gone", len(orphans))
                self._context.tasks.spawn("drop orphans", self._disown(orphans, lease))
            self._sequence.pop(lease, None)

    async def _disown(self, requests: list[RequestEpoch], frontend: str) -> None:
        """Drop requests, and say so: a frontend that was only unheard must not wait for them."""
        await self._drop(requests)
        for request in requests:
            await self._answer_error(request, frontend, "the worker heard nothing of the frontend any more")

    # Tokens

    async def _pump(self) -> None:
        while True:
            step = await self._engine.step()
            if step.load is not None:
                self._context.announcer.observe_load(step.load)
            await self._send(step.timestamp, step.deltas)

    async def _send(self, timestamp: float, deltas: tuple[TokenDelta, ...]) -> None:
        by_frontend: defaultdict[str, list[TokenDelta]] = defaultdict(list)
        for delta in deltas:
            frontend = self._owners.get(RequestEpoch(delta.request_id, delta.epoch))
            if frontend is not None:
                by_frontend[frontend].append(delta)
        for frontend, theirs in by_frontend.items():
            await self._publish(frontend, timestamp, tuple(theirs))
        # Only now: who waits for the last request to end must find its last tokens sent.
        for delta in deltas:
            if delta.finish is not None:
                self._forget(RequestEpoch(delta.request_id, delta.epoch))

    async def _answer_error(self, request: RequestEpoch, frontend: str, why: str, *, refused: bool = False) -> None:
        await self._publish(frontend, time.monotonic(), (_failure(request, why, refused=refused),))

    async def _publish(self, frontend: str, timestamp: float, deltas: tuple[TokenDelta, ...]) -> None:
        data = self._encode(frontend, timestamp, deltas)
        if len(data) > self._context.bus.max_payload:
            for part in self._smaller(deltas):
                await self._publish(frontend, timestamp, part)
            return
        self._sequence[frontend] += 1
        try:
            await self._context.bus.publish(self._context.subjects.tokens(frontend), data)
        except BusError as error:
            # The frontend notices the missing positions.
            _log.warning("tokens for %s not sent: %s", frontend, error)

    def _encode(self, frontend: str, timestamp: float, deltas: tuple[TokenDelta, ...]) -> bytes:
        return codec.encode(TokenBatch(self._context.lease, self._sequence[frontend] + 1, timestamp, deltas))

    def _smaller(self, deltas: tuple[TokenDelta, ...]) -> list[tuple[TokenDelta, ...]]:
        """For deltas that together are more than NATS takes: halves; for one alone, its failure."""
        if len(deltas) > 1:
            middle = len(deltas) // 2
            return [deltas[:middle], deltas[middle:]]
        request = RequestEpoch(deltas[0].request_id, deltas[0].epoch)
        if deltas[0].finish is None:
            self._context.tasks.spawn(f"drop {request}", self._drop([request]))
        return [(_failure(request, "the log-probabilities asked for are more than can be sent"),)]


def _failure(request: RequestEpoch, why: str, *, refused: bool = False) -> TokenDelta:
    return TokenDelta(request.request_id, request.epoch, 0, [], finish="error", error=why, refused=refused)
