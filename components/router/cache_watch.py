"""What the workers of one model have cached, as they tell it: listens, and asks those of which something is missing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

from dynamo_local.bus.nats import Bus
from dynamo_local.bus.subscriptions import Subscription
from dynamo_local.core.errors import BusError, DecodeError
from dynamo_local.core.fleet.view import Change, FleetView, Happened
from dynamo_local.core.messages.kv_events import KvChanges, KvStateQuestion
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.routing.assumed import AssumedCaches
from dynamo_local.core.routing.block_keys import unpack
from dynamo_local.core.routing.index import PrefixIndex
from dynamo_local.core.subjects import Subjects

_log = logging.getLogger(__name__)

_ASK_AGAIN_S = 1.0
"""A worker that is not in step is asked again after this time."""


class CacheWatch:
    """Keeps a prefix index in step with the workers of a view.

    Of a worker whose engine does not tell, the blocks of the requests assigned to it are taken for cached.
    """

    def __init__(self, bus: Bus, subjects: Subjects, view: FleetView) -> None:
        self.index = PrefixIndex()
        self._assumed = AssumedCaches(self.index)
        self._bus = bus
        self._subjects = subjects
        self._view = view
        self._listening: Subscription | None = None
        self._woken = asyncio.Event()
        self._connections = bus.connections

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
            await self._woken.wait()
            self._woken.clear()
            await self._ask()
            await asyncio.sleep(_ASK_AGAIN_S)
            if any(self.out_of_step()):
                self._woken.set()

    def follow(self, change: Change) -> None:
        """Take note of a worker that has come or gone."""
        worker = change.presence
        if change.what in (Happened.LEFT, Happened.REVOKED):
            self.index.forget(worker.lease)
            self._assumed.forget(worker.lease)
        elif _tells(worker) and not self.index.in_step(worker.lease):
            self._woken.set()

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
            self._woken.set()

    def out_of_step(self) -> Iterator[str]:
        """Leases of workers that tell what they have cached, and of which not all has been heard."""
        for worker in self._view.members():
            if _tells(worker) and not self.index.in_step(worker.lease):
                yield worker.lease

    async def _ask(self) -> None:
        for lease in list(self.out_of_step()):
            try:
                await self._bus.send(self._subjects.kv_state(lease), KvStateQuestion())
            except BusError as error:
                _log.warning("worker %s was not asked what it has cached, and will be: %s", lease, error)

    async def _on_changes(self, changes: KvChanges) -> None:
        # What a worker that is gone told last arrives late, and would never be forgotten.
        if self._view.get(changes.worker) is None:
            return
        try:
            complete = self.index.apply(changes)
        except DecodeError as error:
            _log.warning("worker %s told what it has cached in a form that cannot be read: %s", changes.worker, error)
            return
        if not complete:
            self._woken.set()


def _tells(worker: Presence) -> bool:
    return worker.engine is not None and worker.engine.kv_events
