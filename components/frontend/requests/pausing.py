"""Takes requests from their workers for a while, so that others have the room.

A paused request has no worker, as one that is about to be placed. Its log stays, and later it continues from there
under a new epoch, where its KV is cached if it still is.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from components.frontend.requests.live_requests import LiveRequest
from components.frontend.requests.request_table import RequestTable
from components.frontend.worker_link import WorkerLink
from dynamo_local.core.messages.work import RequestEpoch
from dynamo_local.core.request.recovery import RecoveryDeadlines, verdict_after_loss
from dynamo_local.tasks import TaskGuard

RESUME_EVERY_S = 1.0
"""Between two requests that are resumed while others are to stay paused: each computes a part of its context anew."""


@dataclass
class _Paused:
    live: LiveRequest
    worker: str
    leaving: asyncio.Task[None]
    noted_at: float
    """Until when the time of the request's life has been set back."""


class Pauses:
    """The paused requests of one frontend for one model. Loop only."""

    def __init__(self, table: RequestTable, link: WorkerLink, tasks: TaskGuard, deadlines: RecoveryDeadlines) -> None:
        self._table = table
        self._link = link
        self._tasks = tasks
        self._deadlines = deadlines
        self._paused: dict[str, _Paused] = {}
        self._resumed_at = 0.0

    @property
    def paused(self) -> int:
        """Number of requests that are paused."""
        return len(self._paused)

    def keep(self, running: int, priority: int) -> None:
        """Have at most so many requests run of those with this priority or a higher number: the oldest. Others are
        paused, as far as they can be continued. To be called again and again while that is to be so."""
        self._look(now := time.monotonic())
        live = [each for each in self._table.requests.values() if each.request.priority >= priority]
        at_workers = sorted((each for each in live if each.log.worker is not None), key=lambda each: each.born_at)
        for each in at_workers[running:]:
            if self._may_pause(each):
                self._pause(each, now)
        if len(at_workers) < running and now >= self._resumed_at + RESUME_EVERY_S:
            self._resumed_at = now
            self._resume(list(self._paused)[: running - len(at_workers)][:1])

    def end(self) -> None:
        """Have all requests go on."""
        self._look(time.monotonic())
        self._resume(list(self._paused))

    def _may_pause(self, live: LiveRequest) -> bool:
        prefill = live.prefill
        if live.migration.current is not None or prefill.job is not None or prefill.held is not None:
            return False
        if live.recovery.standing.suspect:
            return False
        return verdict_after_loss(live.log.position, live.request.survival, 0, self._deadlines) is None

    def _pause(self, live: LiveRequest, now: float) -> None:
        epoch = live.log.epoch
        worker = live.log.give_up(epoch)
        if worker is not None:
            leaving = self._tasks.spawn(f"pause {live.request_id}", self._leave(live, worker, epoch))
            self._paused[live.request_id] = _Paused(live, worker, leaving, now)

    async def _leave(self, live: LiveRequest, worker: str, epoch: int) -> None:
        await self._link.cancel(worker, RequestEpoch(live.request_id, epoch))
        await self._table.placer.release(live)

    async def _return(self, paused: _Paused) -> None:
        live, placer = paused.live, self._table.placer
        await paused.leaving
        if placer.is_routable(paused.worker):
            # Its KV is there, perhaps.
            await placer.reassign(live, paused.worker)
        await self._table.place(live, paused.worker)

    def _resume(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            paused = self._paused.pop(request_id)
            self._tasks.spawn(f"resume {request_id}", self._return(paused))

    def _look(self, now: float) -> None:
        """Forget requests that have ended, and do not count the pause as a part of others' lives."""
        for request_id, paused in list(self._paused.items()):
            if not self._table.requests.is_live(paused.live):
                del self._paused[request_id]
                continue
            paused.live.born_at += now - paused.noted_at
            paused.noted_at = now
