"""Trying suspect requests: one at a time, each alone on a worker that is set apart for it. Who is suspect, and what
comes of a trial, is decided in core/request/suspicion.py.

A worker that is set apart tells so with its presence, so nobody routes anything there, and every frontend takes away
what it has there (migration/scheduler.py). With one worker only, the others wait meanwhile, for as long as a lost
request waits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from components.frontend.requests import LiveRequest
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core.fleet.view import Change
from dynamo_local.core.messages.work import AskExclusive, EndExclusive
from dynamo_local.core.request.recovery import RecoveryDeadlines
from dynamo_local.core.request.suspicion import Ask, Begin, next_step
from dynamo_local.tasks import TaskGuard

_log = logging.getLogger(__name__)

Tell = Callable[[str, AskExclusive | EndExclusive], Coroutine[Any, Any, None]]
"""Say something to a worker that will be said again if it is lost."""


class Trials:
    """Of one frontend. `is_live` says whether a request is still wanted."""

    def __init__(
        self,
        frontend: str,
        fleet: FleetWatch,
        patience: RecoveryDeadlines,
        tasks: TaskGuard,
        tell: Tell,
        is_live: Callable[[LiveRequest], bool],
    ) -> None:
        self._frontend = frontend
        self._fleet = fleet
        self._patience = patience
        self._tasks = tasks
        self._tell = tell
        self._is_live = is_live
        self._waiting: list[LiveRequest] = []
        """In the order of their turns."""
        self._tried: LiveRequest | None = None
        self._changed = asyncio.Event()
        """Set at the next change of the fleet or of the turns, and then replaced."""

    def start(self) -> None:
        """Follow the fleet from now on."""
        self._fleet.subscribe(self._on_change)

    async def worker_for(self, live: LiveRequest) -> str | None:
        """The worker that is free for a suspect, when its turn has come: its trial begins. None if there was none in
        time, or nobody wants the request any more."""
        deadline = time.monotonic() + self._patience.recovery_s
        self._waiting.append(live)
        try:
            return await self._worker_for(live, deadline)
        finally:
            self._waiting = [other for other in self._waiting if other is not live]
            self._stir()

    def over(self, live: LiveRequest) -> None:
        """End the request's trial or its wait for one: it has ended, is cleared, or has lost its worker."""
        if self._tried is live:
            self._tried = None
            self._tasks.spawn("end of a trial", self.tidy())
        if self._waiting:
            self._stir()

    async def tidy(self) -> None:
        """Have workers that are set apart for nothing any more take others again. To be called now and then."""
        wanted = {live.request_id for live in (self._tried, *self._waiting[:1]) if live is not None}
        for worker in self._fleet.view.exclusive():
            exclusive = worker.exclusive
            if exclusive is not None and exclusive.frontend == self._frontend and exclusive.request_id not in wanted:
                await self._tell(worker.lease, EndExclusive(exclusive.request_id, self._frontend))

    async def _worker_for(self, live: LiveRequest, deadline: float) -> str | None:
        asked: str | None = None
        while self._is_live(live) and (remaining := deadline - time.monotonic()) > 0:
            # Taken before looking, so that no change between the look and the wait is missed.
            changed = self._changed
            if self._tried is None and self._waiting[0] is live:
                await self.tidy()
                step = next_step(live.request_id, self._frontend, self._fleet.view.ready(), asked, live.avoid)
                match step:
                    case Begin():
                        _log.warning("request %s is tried alone: %s", live.request_id, live.standing.suspicion)
                        self._tried = live
                        return step.worker
                    case Ask():
                        asked = step.worker
                        await self._tell(asked, AskExclusive(live.request_id, self._frontend))
            with suppress(TimeoutError):
                async with asyncio.timeout(min(remaining, self._patience.ask_again_s)):
                    await changed.wait()
        return None

    def _on_change(self, _: Change) -> None:
        if self._waiting:
            self._stir()

    def _stir(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
