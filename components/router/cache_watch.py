"""What the workers of one model have cached, as they tell it: listens, and asks those of which something is missing."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress

from dynamo_local.bus.nats import Bus, Subscription
from dynamo_local.core.beats import QUIET_BEAT_S, until_beat
from dynamo_local.core.errors import BusError, DecodeError
from dynamo_local.core.fleet.view import Change, FleetView, Happened
from dynamo_local.core.messages.kv import KvChanges, KvStateQuestion
from dynamo_local.core.routing.caches.index import AssumedCaches, PrefixIndex, unpack
from dynamo_local.core.subjects import Subjects

_log = logging.getLogger(__name__)

_ASK_AGAIN_S = 1.0
"""Shortest time between two questions to a worker that is not in step."""


class CacheWatch:
    """Keeps a prefix index in step with the workers of a view.

    Of a worker whose engine does not tell, the blocks of the requests assigned to it are taken for cached. Before
    `start` it follows nobody. `on_news` is called when what is known has changed.
    """

    def __init__(self, bus: Bus, subjects: Subjects, view: FleetView, on_news: Callable[[], None]) -> None:
        self.index = PrefixIndex()
        self._assumed = AssumedCaches(self.index)
        self._bus = bus
        self._subjects = subjects
        self._view = view
        self._on_news = on_news
        self._listening: Subscription | None = None
        self._telling: set[str] = set()
        """Leases of the workers that tell what they have cached, without those that are gone or revoked."""
        self._behind: dict[str, float] = {}
        """Those of them that are not in step, each with the time from which it may be asked (CLOCK_MONOTONIC, s)."""
        self._woken = asyncio.Event()
        self._connections = bus.connections

    @property
    def out_of_step(self) -> int:
        """Number of workers that tell what they have cached, and of which not all has been heard."""
        return len(self._behind)

    async def start(self) -> None:
        """Listen. Raises BusError."""
        self._listening = await self._bus.listen(self._subjects.kv_events_of_all, KvChanges, self._on_changes)

    async def stop(self) -> None:
        """Listen no more."""
        if self._listening is not None:
            await self._listening.unsubscribe()

    async def run(self) -> None:
        """Ask workers that are not in step for all that they have, until cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._wait_s(time.monotonic())):
                    await self._woken.wait()
            self._woken.clear()
            self.look()
            await self._ask(time.monotonic())

    def follow(self, change: Change) -> None:
        """Take note of a worker that has come, changed or gone."""
        worker = change.presence
        if self._listening is None:
            return
        if change.what in (Happened.LEFT, Happened.REVOKED):
            self._forget(worker.lease)
        elif worker.engine is not None and worker.engine.kv_events:
            self._telling.add(worker.lease)
            self._note_step(worker.lease)
        elif worker.state == "parked":
            # One that tells sends that its cache is cleared; of this one it is known.
            self._forget(worker.lease)

    def assigned(self, worker: str, blocks: bytes) -> None:
        """Take note of a request's blocks (packed keys), which the worker is going to have."""
        presence = self._view.get(worker)
        if blocks and presence is not None and presence.engine is not None and not presence.engine.kv_events:
            self._assumed.use(worker, unpack(blocks), presence.engine.kv_blocks)

    def look(self) -> None:
        """Ask all workers if the connection was lost in between: what they told meanwhile has not been heard."""
        if self._connections != self._bus.connections:
            self._connections = self._bus.connections
            self.index.doubt()
            for lease in self._telling:
                self._note_step(lease)

    def _wait_s(self, now: float) -> float:
        """Time until a worker may be asked again, at most until the next beat: a connection that was restored does not
        tell, and is looked for."""
        return max(0.0, min([until_beat(now, QUIET_BEAT_S), *(at - now for at in self._behind.values())]))

    async def _ask(self, now: float) -> None:
        for lease in [lease for lease, at in self._behind.items() if now >= at]:
            self._behind[lease] = now + _ASK_AGAIN_S
            try:
                await self._bus.send(self._subjects.kv_state(lease), KvStateQuestion())
            except BusError as error:
                _log.warning("worker %s was not asked what it has cached, and will be: %s", lease, error)

    async def _on_changes(self, changes: KvChanges) -> None:
        # What a worker that is gone told last may arrive late, and would never be forgotten. One that is new is asked.
        if changes.worker not in self._telling:
            return
        try:
            self.index.apply(changes)
        except DecodeError as error:
            _log.warning("worker %s told what it has cached in a form that cannot be read: %s", changes.worker, error)
            return
        self._note_step(changes.worker)

    def _note_step(self, lease: str) -> None:
        """Have the worker asked if it is not in step."""
        if self.index.in_step(lease):
            self._behind.pop(lease, None)
        elif lease not in self._behind:
            self._behind[lease] = -math.inf
            self._woken.set()
        self._on_news()

    def _forget(self, lease: str) -> None:
        self._telling.discard(lease)
        self._behind.pop(lease, None)
        self._assumed.forget(lease)
        self.index.forget(lease)
        self._on_news()
