"""The frontend's side of the bus: takes requests from the OpenAI server, and judges the tokens that workers send.

A request's log accepts each position once, and only from the worker of the current epoch (core/request/log.py);
accepted tokens go to the OpenAI server. A worker that sends tokens of an earlier epoch is told to stop. After a gap or
a silence the worker is asked to send again what is missing. What becomes of a request that its worker loses, fails or
refuses is decided in requests/request_table.py.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import ClassVar

from msgspec import structs

from components.frontend.admin import FrontendAdmin
from components.frontend.answers.kept_log import Recording
from components.frontend.migration.scheduler import MigrationExecutor, MigrationScheduler
from components.frontend.placing import Assigner
from components.frontend.prefill import PrefillJobs
from components.frontend.request_context import RouteNotes, request_here
from components.frontend.requests.live_requests import LiveRequest
from components.frontend.requests.pausing import Pauses
from components.frontend.requests.request_table import RequestTable
from components.frontend.worker_link import Retransmitter, WorkerLink
from dynamo_local.bus.nats import Bus
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core.errors import BusError
from dynamo_local.core.fleet.view import Change, Happened
from dynamo_local.core.messages.presence import LeaseLost, Presence
from dynamo_local.core.messages.work import RequestEpoch, TokenBatch, TokenDelta
from dynamo_local.core.ports import Outputs, Request
from dynamo_local.core.request.log import Verdict, continuation, failure
from dynamo_local.core.request.recovery import RecoveryDeadlines
from dynamo_local.core.subjects import Subjects
from dynamo_local.tasks import TaskGuard

_log = logging.getLogger(__name__)

_CHECK_EVERY_S = 0.25
"""Between two looks for requests that are silent or overdue."""


class BusDispatcher:
    """Spreads a frontend's requests over the workers of the namespace. Implements `core.ports.Dispatcher`."""

    table_type: ClassVar[type[RequestTable]] = RequestTable
    """Replaced by subclasses that follow the losses of requests."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        lease: str,
        fleet: FleetWatch,
        assigner: Assigner,
        tasks: TaskGuard,
        deadlines: RecoveryDeadlines | None = None,
        jobs: PrefillJobs | None = None,
    ) -> None:
        """`lease` is the frontend's own. `jobs`: None if the graph has no prefill workers."""
        self._bus = bus
        self._subjects = subjects
        self._lease = lease
        self._fleet = fleet
        self._assigner = assigner
        self._tasks = tasks
        self._deadlines = deadlines or RecoveryDeadlines()
        self._link = WorkerLink(bus, subjects, lease)
        self.retransmitter = Retransmitter(self._link, tasks, self._deadlines)
        self.table = self.table_type(self._link, fleet, assigner, tasks, self._deadlines, jobs)
        self.pauses = Pauses(self.table, self._link, tasks, self._deadlines)
        executor = MigrationExecutor(self.table, self._link)
        self.migrations = MigrationScheduler(self.table, executor, self._link, fleet, tasks)
        self.admin = FrontendAdmin(bus, subjects, lease, self.migrations, tasks)

    async def start(self) -> None:
        """Begin to listen. Call once, before the first request."""
        await self._bus.listen(self._subjects.tokens(self._lease), TokenBatch, self._on_batch)
        await self.table.remote_prefill.start()
        self.migrations.start()
        self.table.trials.start()
        await self.admin.start()
        self._fleet.subscribe(self._on_fleet_change)
        self._tasks.spawn("silent and overdue requests", self._watch_time())
        self._tasks.spawn("assigner", self._assigner.run())

    @property
    def live_requests(self) -> int:
        """Number of requests that have not ended."""
        return len(self.table.requests)

    async def submit(self, request: Request) -> None:
        context = request_here()
        request = context.prioritized(request)
        if (why := context.charge(request)) is not None:
            self.table.refuse(request, why)
            return
        context.submit(lambda: self._add(request, context.notes, context.recording))

    def _add(self, request: Request, notes: RouteNotes | None, recording: Recording | None) -> None:
        # State that even one of the engines cannot rebuild is lost: the request may go there.
        forgotten = {name for each in self._fleet.view.members() if each.engine for name in each.engine.forgotten}
        request = structs.replace(request, survival=request.survival.without(forgotten))
        why = None if recording is None else recording.begin(request, self._subjects.revision)
        if why is None:
            self.table.add(request, notes, recording)
        else:
            self.table.refuse(request, why)

    async def cancel(self, request_ids: Sequence[str]) -> None:
        await self.table.remove(request_ids)

    async def cancel_all(self) -> None:
        """Cancel every request: the frontend ends, and with it the connections of all clients."""
        await self.table.remove(list(self.table.requests))

    async def outputs(self) -> Outputs:
        return await self.table.outputs.get()

    # Tokens

    async def _on_batch(self, batch: TokenBatch) -> None:
        now = time.monotonic()
        accepted = [delta for delta in (self._take(batch.worker, delta, now) for delta in batch.deltas) if delta]
        for delta in accepted:
            self.table.record(delta)
        if accepted:
            self.table.outputs.put_nowait(Outputs(now, tuple(accepted)))
        for delta in accepted:
            if delta.finish is not None:
                await self.table.remove([delta.request_id])
        await self._note_first_tokens(accepted)
        live = [live for delta in accepted if (live := self.table.requests.get(delta.request_id)) is not None]
        await self.retransmitter.acknowledge(batch.worker, live)

    async def _note_first_tokens(self, accepted: Sequence[TokenDelta]) -> None:
        for delta in accepted:
            live = self.table.requests.get(delta.request_id)
            if live is not None and delta.position == live.recovery.epoch_start and not live.at_prefill_worker:
                await self.table.placer.prefilled(live)

    def _take(self, worker: str, delta: TokenDelta, now: float) -> TokenDelta | None:
        """Return the part of a delta that is news to the client, if any."""
        live = self.table.requests.get(delta.request_id)
        if live is None or delta.epoch != live.log.epoch:
            self._dismiss(worker, delta)
            return None
        live.recovery.hear(now)
        if delta.refused or delta.failed:
            if delta.failed:
                self.table.placer.breakers.failure(worker, now)
            self._tasks.spawn(f"replace {delta.request_id}", self.table.lose(live, delta.epoch))
            return None
        # A fault of the request itself (`fault`) is not the end of a prefill: the decode worker would meet it, too.
        if delta.finish is not None and live.at_prefill_worker and delta.fault is None:
            return self.table.remote_prefill.take(live, delta)
        return self._accept(live, delta, now)

    def _accept(self, live: LiveRequest, delta: TokenDelta, now: float) -> TokenDelta | None:
        continued = live.recovery.epoch_start > 0
        verdict, known = live.log.accept(delta)
        if verdict is Verdict.GAP:
            self.retransmitter.ask_after_gap(live, now)
        if verdict is not Verdict.ACCEPTED:
            return None
        live.accepted(now)
        if not live.recovery.standing.suspect:
            self.table.trials.end(live)
        if live.prefill.held is not None:
            # The decode worker computes, so it has pulled the KV or does without.
            self._tasks.spawn(f"taken over {live.request_id}", self.table.remote_prefill.release(live))
        if delta.finish == "error":
            return failure(live.log, delta.error or "the worker gave no reason", delta.fault)
        return continuation(delta, known) if known or continued else delta

    def _dismiss(self, worker: str, delta: TokenDelta) -> None:
        """Stop a worker that sends tokens of a request that has ended, or is another worker's now. A prefill whose end
        was sent twice is left alone while its KV is still to be pulled."""
        stale = RequestEpoch(delta.request_id, delta.epoch)
        if not delta.refused and not self.table.remote_prefill.is_held(stale):
            self._tasks.spawn(f"dismiss {stale}", self._link.cancel(worker, stale))

    # Time

    async def _watch_time(self) -> None:
        requests, limit_s = self.table.requests, self._deadlines.request_s
        while True:
            await requests.pause(_CHECK_EVERY_S)
            now = time.monotonic()
            for live in [live for live in requests.values() if now - live.born_at > limit_s]:
                await self.table.fail(live, f"the request took longer than {limit_s:g} s")
            self.table.remote_prefill.withdraw_overdue(now)
            # Without the bus every worker is silent, and cannot be asked.
            if self._bus.connected:
                await self.table.trials.tidy()
                await self.retransmitter.ask_after_silence(requests.values(), now)

    # Workers that come and go

    def _on_fleet_change(self, change: Change) -> None:
        if change.what in (Happened.APPEARED, Happened.UPDATED):
            self.table.placer.fleet_changed()
        elif change.what is Happened.LEFT:
            self._on_worker_left(change.presence)
            self._tasks.spawn(f"tell that {change.presence.lease} is gone", self._tell_lost(change.presence.lease))

    async def _tell_lost(self, lease: str) -> None:
        """Workers that wait for an answer of that process hear of no worker but from frontends."""
        with suppress(BusError):
            await self._bus.send(self._subjects.lost, LeaseLost(lease))

    def _on_worker_left(self, gone: Presence) -> None:
        self.table.placer.breakers.forget(gone.lease)
        for live in list(self.table.requests.values()):
            held = live.prefill.held
            if held is not None and held.worker == gone.lease:
                # The worker may only be cut off, and would keep the blocks for nothing.
                self._tasks.spawn(f"lost source of {live.request_id}", self.table.remote_prefill.release(live))
            if live.loses(gone):
                self._tasks.spawn(f"replace {live.request_id}", self.table.lose(live, live.log.epoch))
