"""The frontend's side of the bus: owns the log of every request, and decides who works on it.

A request is placed (assigned to a worker under a new epoch), its tokens are judged by its log, and accepted ones go to
the OpenAI server. Whatever goes wrong on the way comes to one of three things:

    a gap or a silence     its worker is asked to send again what is missing
    its worker is lost,    the request continues elsewhere from its log, under a new epoch, if its sampling survives
    fails or refuses it    that (core/request/fidelity.py)
    otherwise              it fails: an answer, given to this one request

What an earlier epoch's worker still sends is fenced off by its log, and that worker is told to stop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from components.frontend.admin import FrontendAdmin
from components.frontend.assigner import Assigner
from components.frontend.migration.executor import MigrationExecutor
from components.frontend.migration.scheduler import MigrationScheduler
from components.frontend.prefill_jobs import PrefillJobs
from components.frontend.remote_prefill import RemotePrefill
from components.frontend.requests import LiveRequest, LiveRequests, Placer
from components.frontend.retransmit import Retransmitter
from components.frontend.trials import Trials
from dynamo_local.bus.nats import Bus, Message
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core import codec
from dynamo_local.core.errors import BusError, DecodeError
from dynamo_local.core.fleet.breaker import Breakers
from dynamo_local.core.fleet.view import Change, Happened
from dynamo_local.core.messages.tokens import Fault, TokenBatch, TokenDelta
from dynamo_local.core.messages.work import Ack, AskExclusive, Cancel, EndExclusive, RequestEpoch, Resend
from dynamo_local.core.names import Subjects
from dynamo_local.core.ports import Outputs, Request
from dynamo_local.core.request.log import RequestLog, Verdict, continuation, failure
from dynamo_local.core.request.recovery import RecoveryDeadlines, verdict_after_loss
from dynamo_local.tasks import TaskGuard

_log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.25


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
        patience: RecoveryDeadlines | None = None,
        remote: PrefillJobs | None = None,
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._lease = lease
        self._fleet = fleet
        self._assigner = assigner
        self._tasks = tasks
        self._patience = patience or RecoveryDeadlines()
        self._breakers = Breakers()
        self._placer = Placer(
            bus, subjects, lease, assigner, self._breakers, self._patience, lambda: bool(fleet.view.exclusive())
        )
        self._trials = Trials(lease, fleet, self._patience, tasks, self._tell, self._is_live)
        self._inquiries = Retransmitter(lease, self._patience, tasks, self._tell)
        self._live = LiveRequests()
        self._outputs: asyncio.Queue[Outputs] = asyncio.Queue()
        self._desk = (
            None if remote is None else RemotePrefill(remote, self._placer, self._live, tasks, self._tell, self._place)
        )
        carrier = MigrationExecutor(
            bus, subjects, lease, self._placer, assigner, self._is_live, self._is_routable, self._tell, self._lose
        )
        self.mover = MigrationScheduler(self._live, fleet, carrier, tasks, self._tell, self._place)
        self._requests = FrontendAdmin(bus, subjects, lease, self._live, self.mover, tasks)

    async def start(self) -> None:
        """Begin to listen. Call once, before the first request."""
        await self._bus.subscribe(self._subjects.tokens(self._lease), self._on_batch)
        if self._desk is not None:
            await self._desk.start()
        self.mover.start()
        self._trials.start()
        await self._requests.start()
        self._fleet.subscribe(self._on_fleet_change)
        self._tasks.spawn("silences", self._watch_time())
        self._tasks.spawn("assigner", self._assigner.run())

    @property
    def live_requests(self) -> int:
        """Requests under way."""
        return len(self._live)

    async def submit(self, request: Request) -> None:
        # What one of the engines cannot rebuild is lost, wherever the request may go.
        forgotten = {name for each in self._fleet.view.members() if each.engine for name in each.engine.forgotten}
        request = replace(request, survival=request.survival.without(forgotten))
        log = RequestLog(request.request_id, request.prompt_token_ids)
        live = LiveRequest(request, log, born_at=time.monotonic())
        self._live[request.request_id] = live
        self._tasks.spawn(f"place {request.request_id}", self._place(live))

    async def cancel(self, request_ids: Sequence[str]) -> None:
        # First all of them: what becomes of one may be up to the others that are still wanted.
        for live in [live for request_id in request_ids if (live := self._live.pop(request_id, None)) is not None]:
            await self._leave_worker(live)

    async def cancel_all(self) -> None:
        """Forget everything: nobody is left to answer to."""
        await self.cancel(list(self._live))

    async def outputs(self) -> Outputs:
        return await self._outputs.get()

    # Placing

    async def _place(self, live: LiveRequest, preferred: str | None = None) -> None:
        try:
            await self._try_to_place(live, preferred)
        except (BusError, DecodeError) as error:
            await self._fail(live, f"the request could not be handed to a worker: {error}")
        except Exception:  # noqa: BLE001
            # The boundary of a request: what is wrong with one must not end the process, and so all others.
            _log.exception("request %s could not be placed", live.request_id)
            await self._fail(live, "the request could not be prepared for a worker")

    async def _try_to_place(self, live: LiveRequest, preferred: str | None) -> None:
        if live.standing.suspect:
            await self._try_alone(live)
            return
        worker = preferred if self._is_routable(preferred) else None
        if worker is None:
            worker = await self._placer.assign(live, lambda: self._is_live(live))
        if worker is None:
            await self._fail(live, "no worker is ready to take the request; try again later")
        elif self._desk is None or not await self._desk.offer(live, worker):
            await self._give(live, worker)

    async def _try_alone(self, live: LiveRequest) -> None:
        """Give the request a worker of its own. Its prompt is computed there, too, and nothing is pulled."""
        await self._release_held(live)
        worker = await self._trials.worker_for(live)
        if worker is None:
            why = f"{live.standing.suspicion}, and no worker could be set apart to try it alone; try again later"
            await self._fail(live, why)
            return
        await self._assigner.moved(live.request_id, worker, live.tokens)
        await self._give(live, worker)

    async def _give(self, live: LiveRequest, worker: str) -> None:
        """Hand the request to the worker that is to finish it."""
        if not self._is_live(live):
            await self._assigner.release(live.request_id)
            return
        current = live.log.assign(worker)
        await self._placer.send(live, current, worker)
        # A worker lost while the submission was being prepared took its LEFT notice with it.
        if not self._is_there(worker):
            await self._lose(live, current.epoch)

    def _is_there(self, worker: str) -> bool:
        return self._fleet.view.get(worker) is not None

    def _is_routable(self, worker: str | None) -> bool:
        return any(presence.lease == worker for presence in self._fleet.view.routable())

    async def _leave_worker(self, live: LiveRequest) -> None:
        """Free the worker of a request: it has been answered in full, or nobody wants the answer."""
        if self._desk is not None:
            self._desk.leave(live)
        live.stir()
        self._trials.over(live)
        await self._assigner.release(live.request_id)
        if live.log.worker is not None:
            await self._tell(live.log.worker, Cancel(requests=(live.log.current,)))
        await self._release_held(live)

    async def _release_held(self, live: LiveRequest) -> None:
        """The request needs the held prefill no more: its decode worker has it, or the request is over."""
        held, live.held = live.held, None
        if held is not None and not self._is_held(held.request):
            await self._tell(held.worker, Cancel(requests=(held.request,)))

    def _is_held(self, prefill: RequestEpoch) -> bool:
        return self._desk is not None and self._desk.still_holds(prefill)

    async def _tell(self, worker: str, message: Cancel | Ack | Resend | AskExclusive | EndExclusive) -> None:
        """Say something that will be said again if it is lost."""
        try:
            await self._bus.publish(self._subjects.work(worker), codec.encode(message))
        except BusError as error:
            _log.warning("%s not told of %s: %s", worker, type(message).__name__, error)

    # Tokens

    async def _on_batch(self, message: Message) -> None:
        try:
            batch = codec.decode(message.data, TokenBatch)
        except DecodeError as error:
            _log.warning("tokens ignored: %s", error)
            return
        now = time.monotonic()
        accepted = [delta for delta in (self._take(batch.worker, delta, now) for delta in batch.deltas) if delta]
        if accepted:
            self._outputs.put_nowait(Outputs(batch.timestamp, tuple(accepted)))
        for delta in accepted:
            if delta.finish is not None:
                await self._finish(delta.request_id)
        live = [live for delta in accepted if (live := self._live.get(delta.request_id)) is not None]
        await self._inquiries.acknowledge(batch.worker, live)

    def _take(self, worker: str, delta: TokenDelta, now: float) -> TokenDelta | None:
        """The part of a delta that is news to the client."""
        live = self._live.get(delta.request_id)
        if live is None or delta.epoch != live.log.epoch:
            self._dismiss(worker, delta)
            return None
        live.heard_at = now
        if delta.refused or delta.failed:
            if delta.failed:
                self._breakers.failure(worker, now)
            self._tasks.spawn(f"replace {delta.request_id}", self._lose(live, delta.epoch))
            return None
        # What no worker can do, the decode worker cannot do either.
        if self._desk is not None and delta.finish is not None and live.at_prefill_worker and delta.fault is None:
            return self._desk.take(live, delta)
        return self._accept(live, delta, now)

    def _accept(self, live: LiveRequest, delta: TokenDelta, now: float) -> TokenDelta | None:
        continued = live.log.epoch > 1 and live.epoch_start > 0
        verdict, known = live.log.accept(delta)
        if verdict is Verdict.GAP:
            self._inquiries.about_gap(live, now)
        if verdict is not Verdict.ACCEPTED:
            return None
        live.accepted(now)
        if not live.standing.suspect:
            self._trials.over(live)
        if live.held is not None:
            self._tasks.spawn(f"taken over {live.request_id}", self._release_held(live))
        if delta.finish == "error":
            return failure(live.log, delta.error or "the worker gave no reason", delta.fault)
        return continuation(delta, known) if known or continued else delta

    def _dismiss(self, worker: str, delta: TokenDelta) -> None:
        """Nobody waits for these tokens: the request has ended, or is another worker's now. (Of a prefill, somebody
        may still want the KV: its end was told twice then.)"""
        ghost = RequestEpoch(delta.request_id, delta.epoch)
        if not delta.refused and not self._is_held(ghost):
            self._tasks.spawn(f"dismiss {ghost}", self._tell(worker, Cancel(requests=(ghost,))))

    async def _finish(self, request_id: str) -> None:
        live = self._live.pop(request_id, None)
        if live is not None:
            await self._leave_worker(live)

    # Time

    async def _watch_time(self) -> None:
        while True:
            await self._live.pause(_LOOK_EVERY_S)
            now = time.monotonic()
            for live in [live for live in self._live.values() if now - live.born_at > self._patience.request_s]:
                await self._fail(live, f"the request took longer than {self._patience.request_s:g} s")
            if self._desk is not None:
                self._desk.withdraw_overdue(now)
            if self._bus.connected:
                await self._trials.tidy()
                await self._inquiries.about_silence(self._live.values(), now)

    # Losses

    def _on_fleet_change(self, change: Change) -> None:
        if change.what in (Happened.APPEARED, Happened.UPDATED):
            self._placer.fleet_changed()
        elif change.what is Happened.LEFT:
            lost = change.presence.lease
            self._breakers.forget(lost)
            for live in list(self._live.values()):
                if live.held is not None and live.held.worker == lost:
                    # It may only be unheard, and keep the blocks for nobody.
                    self._tasks.spawn(f"lost source of {live.request_id}", self._release_held(live))
                if live.loses(change.presence):
                    self._tasks.spawn(f"replace {live.request_id}", self._lose(live, live.log.epoch))

    async def _lose(self, live: LiveRequest, epoch: int) -> None:
        """The worker of this epoch is gone, failed the request, or will not have it."""
        worker = live.log.give_up(epoch) if self._is_live(live) else None
        if worker is None:
            return
        live.lost(worker)
        live.stir()
        self._trials.over(live)
        # A prefill worker that is lost is no reason to change the decode worker.
        decode = live.decode if live.job is not None else None
        if self._desk is not None:
            self._desk.leave(live)
        # It may only be unheard, and at work.
        await self._tell(worker, Cancel(requests=(RequestEpoch(live.request_id, epoch),)))
        why = verdict_after_loss(live.log.position, live.request.survival, live.fruitless, self._patience)
        if live.standing.guilty:
            await self._fail(live, live.standing.charge, "deaths")
        elif why is None:
            await self._place(live, decode)
        else:
            await self._fail(live, why)

    async def _fail(self, live: LiveRequest, why: str, fault: Fault | None = None) -> None:
        if not self._is_live(live):
            return
        del self._live[live.request_id]
        _log.warning("request %s failed: %s", live.request_id, why)
        self._outputs.put_nowait(Outputs(time.monotonic(), (failure(live.log, why, fault),)))
        await self._leave_worker(live)

    def _is_live(self, live: LiveRequest) -> bool:
        return self._live.get(live.request_id) is live
