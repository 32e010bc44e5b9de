"""The frontend's side of the bus: owns the log of every request, and decides who works on it.

A request is placed (assigned to a worker under a new epoch), its tokens are taken in by its log, and accepted ones
go to the OpenAI server. A request whose worker is lost, or refuses it, before its first token is placed anew; one
that has already shown tokens fails. Failures are answers, given to the one request they concern.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from dynamo_local.core import codec
from dynamo_local.core.errors import BusError, DecodeError
from dynamo_local.core.fleet import Change, Happened
from dynamo_local.core.messages import AssignRequest, Cancel, RequestEpoch, Submit, TokenBatch, TokenDelta
from dynamo_local.core.names import Subjects
from dynamo_local.core.ports import Outputs, Request
from dynamo_local.core.request_log import RequestLog, Verdict
from dynamo_local.runtime.assigner import Assigner
from dynamo_local.runtime.bus import Bus, Message
from dynamo_local.runtime.presence import FleetWatch
from dynamo_local.runtime.tasks import TaskGuard

_log = logging.getLogger(__name__)

PLACEMENT_DEADLINE_S = 10.0
"""How long a request waits for a worker to become routable before it fails."""

_ASK_AGAIN_S = 0.5
"""A waiting request asks again so often, though nothing changed here: the router may have heard of more."""

MAX_EPOCHS = 5
"""Assignments of one request before it is given up."""


@dataclass
class _Live:
    request: Request
    log: RequestLog
    avoid: list[str] = field(default_factory=list)


class BusDispatcher:
    """Spreads a frontend's requests over the workers of the namespace. Implements `core.ports.Dispatcher`."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        lease: str,
        fleet: FleetWatch,
        assigner: Assigner,
        tasks: TaskGuard,
        *,
        placement_deadline_s: float = PLACEMENT_DEADLINE_S,
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._lease = lease
        self._fleet = fleet
        self._assigner = assigner
        self._tasks = tasks
        self._live: dict[str, _Live] = {}
        self._outputs: asyncio.Queue[Outputs] = asyncio.Queue()
        self._placement_deadline_s = placement_deadline_s
        self._fleet_changed = asyncio.Event()
        """Set at the next change of the fleet, and then replaced."""

    async def start(self) -> None:
        """Begin to listen. Call once, before the first request."""
        await self._bus.subscribe(self._subjects.tokens(self._lease), self._on_batch)
        self._fleet.subscribe(self._on_fleet_change)

    @property
    def live_requests(self) -> int:
        """Requests under way."""
        return len(self._live)

    async def submit(self, request: Request) -> None:
        live = _Live(request, RequestLog(request.request_id, request.prompt_token_ids))
        self._live[request.request_id] = live
        self._start_placing(live)

    async def cancel(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            live = self._live.pop(request_id, None)
            if live is not None:
                await self._leave_worker(live, stop=True)

    async def outputs(self) -> Outputs:
        return await self._outputs.get()

    # Placing

    def _start_placing(self, live: _Live) -> None:
        self._tasks.spawn(f"place {live.request.request_id}", self._place_or_fail(live))

    async def _place_or_fail(self, live: _Live) -> None:
        try:
            await self._place(live)
        except (BusError, DecodeError) as error:
            await self._fail(live, f"the request could not be handed to a worker: {error}")
        except Exception:  # noqa: BLE001
            # The boundary of a request: what is wrong with one must not end the process, and so all others.
            _log.exception("request %s could not be placed", live.request.request_id)
            await self._fail(live, "the request could not be prepared for a worker")

    async def _place(self, live: _Live) -> None:
        if live.log.epoch >= MAX_EPOCHS:
            await self._fail(live, f"gave up after {MAX_EPOCHS} workers had failed the request")
            return
        worker = await self._assign(live)
        if not self._is_live(live):
            await self._assigner.release(live.request.request_id)
        elif worker is None:
            await self._fail(live, "no worker is ready to take the request; try again later")
        else:
            await self._send(live, live.log.assign(worker))

    async def _assign(self, live: _Live) -> str | None:
        """A worker, waiting for one if need be."""
        wanted = AssignRequest(
            request_id=live.request.request_id,
            frontend=self._lease,
            tokens=len(live.request.prompt_token_ids) + live.log.position,
            avoid=tuple(live.avoid),
        )
        deadline = time.monotonic() + self._placement_deadline_s
        while True:
            # Taken before asking, so that no change between the answer and the wait is missed.
            changed = self._fleet_changed
            worker = await self._assigner.assign(wanted)
            remaining = deadline - time.monotonic()
            if worker is not None or remaining <= 0 or not self._is_live(live):
                return worker
            with suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), min(remaining, _ASK_AGAIN_S))

    async def _send(self, live: _Live, current: RequestEpoch) -> None:
        request, log = live.request, live.log
        worker = log.worker
        assert worker is not None
        work = Submit(
            request_id=current.request_id,
            epoch=current.epoch,
            frontend=self._lease,
            token_ids=[*request.prompt_token_ids, *log.tokens],
            sampling=msgspec.Raw(request.sampling(log.position)),
            position=log.position,
            arrival_time=request.arrival_time,
            priority=request.priority,
            cache_salt=request.cache_salt,
            reasoning_ended=request.reasoning_ended,
        )
        await self._bus.publish(self._subjects.work(worker), codec.encode(work))
        # A worker lost while the submission was being prepared took its LEFT notice with it.
        if self._fleet.view.get(worker) is None:
            await self._lose(live, current.epoch)

    async def _leave_worker(self, live: _Live, *, stop: bool) -> None:
        """Free the worker of a request; with `stop`, it is still working on it and has to be told."""
        await self._assigner.release(live.request.request_id)
        if stop and live.log.worker is not None:
            await self._stop(live.log.worker, live.log.current)

    async def _stop(self, worker: str, request: RequestEpoch) -> None:
        message = codec.encode(Cancel(requests=(request,)))
        try:
            await self._bus.publish(self._subjects.work(worker), message)
        except BusError as error:
            _log.warning("cannot cancel %s: %s", request, error)

    # Tokens

    async def _on_batch(self, message: Message) -> None:
        try:
            batch = codec.decode(message.data, TokenBatch)
        except DecodeError as error:
            _log.warning("tokens ignored: %s", error)
            return
        accepted = [delta for delta in map(self._take, batch.deltas) if delta is not None]
        if accepted:
            self._outputs.put_nowait(Outputs(batch.timestamp, tuple(accepted)))
        for delta in accepted:
            if delta.finish is not None:
                await self._finish(delta.request_id)

    def _take(self, delta: TokenDelta) -> TokenDelta | None:
        """The part of a delta that is news to the client."""
        live = self._live.get(delta.request_id)
        if live is None:
            return None
        if delta.refused:
            self._tasks.spawn(f"replace {delta.request_id}", self._lose(live, delta.epoch))
            return None
        verdict, known = live.log.accept(delta)
        if verdict is Verdict.GAP:
            why = f"tokens {live.log.position} to {delta.position - 1} were lost on the way"
            self._tasks.spawn(f"fail {delta.request_id}", self._fail(live, why))
        if verdict is not Verdict.ACCEPTED:
            return None
        if delta.finish == "error":
            return _failure(live.log, delta.error or "the worker gave no reason")
        return _without_first(delta, known)

    async def _finish(self, request_id: str) -> None:
        live = self._live.pop(request_id, None)
        if live is not None:
            await self._leave_worker(live, stop=False)

    # Losses

    def _on_fleet_change(self, change: Change) -> None:
        if change.what in (Happened.APPEARED, Happened.UPDATED):
            changed, self._fleet_changed = self._fleet_changed, asyncio.Event()
            changed.set()
        elif change.what is Happened.LEFT:
            for live in [live for live in self._live.values() if live.log.worker == change.presence.lease]:
                self._tasks.spawn(f"replace {live.request.request_id}", self._lose(live, live.log.epoch))

    async def _lose(self, live: _Live, epoch: int) -> None:
        """The worker of this epoch is gone or will not have the request."""
        worker = live.log.give_up(epoch) if self._is_live(live) else None
        if worker is None:
            return
        live.avoid.append(worker)
        # It may only be unheard, and at work.
        await self._stop(worker, RequestEpoch(live.request.request_id, epoch))
        if live.log.position > 0:
            await self._fail(live, "the worker that generated the answer was lost")
        else:
            await self._place_or_fail(live)

    async def _fail(self, live: _Live, why: str) -> None:
        if not self._is_live(live):
            return
        del self._live[live.request.request_id]
        _log.warning("request %s failed: %s", live.request.request_id, why)
        self._outputs.put_nowait(Outputs(time.monotonic(), (_failure(live.log, why),)))
        await self._leave_worker(live, stop=True)

    def _is_live(self, live: _Live) -> bool:
        return self._live.get(live.request.request_id) is live


def _failure(log: RequestLog, why: str) -> TokenDelta:
    return TokenDelta(log.request_id, log.epoch, log.position, [], finish="error", error=why)


def _without_first(delta: TokenDelta, known: int) -> TokenDelta:
    """The delta without its first `known` tokens and their logprobs."""
    if known == 0:
        return delta
    logprobs = None if delta.logprobs is None else delta.logprobs.without_first(known)
    return msgspec.structs.replace(
        delta, position=delta.position + known, token_ids=delta.token_ids[known:], logprobs=logprobs
    )
