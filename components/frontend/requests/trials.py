"""Tries suspect requests: one at a time, each alone on a worker that is set apart for it. Which requests are suspect,
and what comes of a trial, is decided in core/request/recovery.py.

A worker that is set apart says so in its presence. Nothing is routed there then, and every frontend migrates away the
requests that it has there (migration/scheduler.py). In a graph with one worker the other requests wait meanwhile, for
as long as a request that lost its worker waits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress

from components.frontend.requests.live_requests import LiveRequest, LiveRequests
from components.frontend.worker_link import WorkerLink
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core.fleet.view import Change
from dynamo_local.core.request.recovery import Ask, Begin, RecoveryDeadlines, next_step
from dynamo_local.tasks import TaskGuard

_log = logging.getLogger(__name__)


class Trials:
    """The trials of one frontend's suspect requests."""

    def __init__(
        self,
        requests: LiveRequests,
        link: WorkerLink,
        fleet: FleetWatch,
        tasks: TaskGuard,
        deadlines: RecoveryDeadlines,
    ) -> None:
        self._requests = requests
        self._link = link
        self._fleet = fleet
        self._tasks = tasks
        self._deadlines = deadlines
        self._waiting: list[LiveRequest] = []
        """Suspects in the order in which they are tried."""
        self._tried: LiveRequest | None = None
        self._changed = asyncio.Event()
        """Set when the fleet or `_waiting` changes, and then replaced."""

    def start(self) -> None:
        """Follow the fleet from now on."""
        self._fleet.subscribe(self._on_change)

    async def worker_for(self, live: LiveRequest) -> str | None:
        """Wait until the suspect may be tried, and a worker is free for it. Return that worker: the trial begins. None
        if there was no worker in time, or the request has ended."""
        deadline = time.monotonic() + self._deadlines.recovery_s
        self._waiting.append(live)
        try:
            return await self._worker_for(live, deadline)
        finally:
            self._waiting = [other for other in self._waiting if other is not live]
            self._wake()

    def end(self, live: LiveRequest) -> None:
        """End the request's trial or its wait for one: it has ended, is cleared, or has lost its worker."""
        if self._tried is live:
            self._tried = None
            self._tasks.spawn("end of a trial", self.tidy())
        if self._waiting:
            self._wake()

    async def tidy(self) -> None:
        """Have workers take requests again that are set apart for none any more. Call from time to time: the message
        may be lost."""
        wanted = {live.request_id for live in (self._tried, *self._waiting[:1]) if live is not None}
        for worker in self._fleet.view.exclusive():
            exclusive = worker.exclusive
            if exclusive is None or exclusive.frontend != self._link.frontend:
                continue
            if exclusive.request_id not in wanted:
                await self._link.end_exclusive(worker.lease, exclusive.request_id)

    async def _worker_for(self, live: LiveRequest, deadline: float) -> str | None:
        asked: str | None = None
        while self._requests.is_live(live) and (remaining := deadline - time.monotonic()) > 0:
            # Taken before looking, so that no change between the look and the wait is missed.
            changed = self._changed
            if self._tried is None and self._waiting[0] is live:
                await self.tidy()
                workers, recovery = self._fleet.view.ready(), live.recovery
                step = next_step(live.request_id, self._link.frontend, workers, asked, recovery.avoid)
                match step:
                    case Begin():
                        _log.warning("request %s is tried alone: %s", live.request_id, recovery.standing.suspicion)
                        self._tried = live
                        return step.worker
                    case Ask():
                        asked = step.worker
                        await self._link.ask_exclusive(asked, live.request_id)
            with suppress(TimeoutError):
                async with asyncio.timeout(min(remaining, self._deadlines.ask_again_s)):
                    await changed.wait()
        return None

    def _on_change(self, _: Change) -> None:
        if self._waiting:
            self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
