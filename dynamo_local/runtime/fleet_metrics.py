"""The planner's metrics: what the statefile, the presences and the prefill queue say, pulled together.

Reads only. What cannot be read is reported as unknown, never as zero.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection

from dynamo_local.core.errors import BusError, StateError
from dynamo_local.core.fleet import PREFILL_ROLE
from dynamo_local.core.names import Subjects
from dynamo_local.core.planning.observation import PLANNED_ROLES, Claim, Observation, QueueReading, observe
from dynamo_local.runtime.bus import Bus
from dynamo_local.runtime.prefill_queue import PrefillQueue
from dynamo_local.runtime.presence import FleetWatch
from state.model import State
from state.store import StateStore

_log = logging.getLogger(__name__)


class FleetMetrics:
    """Pulls observations of one running server. `roles` are those that its graph's services have."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        watch: FleetWatch,
        store: StateStore,
        roles: Collection[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bus = bus
        self._watch = watch
        self._store = store
        self._roles = frozenset(roles) & PLANNED_ROLES
        self._queue = PrefillQueue(bus, subjects)
        self._clock = clock
        self._unread: set[str] = set()
        """What could not be read the last time, so that it is said once and not every second."""

    async def pull(self) -> Observation:
        """The fleet as it is now. Raises NotRunningError when the server has ended."""
        claims = await self._claims()
        queue = await self._queue_length()
        view = self._watch.view
        # Asked for after the others: while they were waited for the connection may have been lost.
        return observe(
            at=self._clock(),
            connected=self._bus.connected,
            claims=claims,
            members=view.members(),
            routable=view.routable(PLANNED_ROLES),
            roles=self._roles,
            queue=queue,
        )

    async def _claims(self) -> tuple[Claim, ...] | None:
        try:
            state = await asyncio.to_thread(self._store.read)
        except StateError as error:
            self._missed("statefile", str(error))
            return None
        self._unread.discard("statefile")
        return claims_of(state)

    async def _queue_length(self) -> QueueReading | None:
        if PREFILL_ROLE not in self._roles or not self._bus.connected:
            return None
        try:
            length = await self._queue.length()
        except BusError as error:
            self._missed("prefill queue", str(error))
            return None
        self._unread.discard("prefill queue")
        return QueueReading(length.waiting, length.in_hand)

    def _missed(self, what: str, why: str) -> None:
        if what not in self._unread:
            self._unread.add(what)
            _log.warning("the %s cannot be read: %s", what, why)


def claims_of(state: State) -> tuple[Claim, ...]:
    """What the statefile says of workers that run, start or restart."""
    return tuple(
        Claim(name, component.role, len(component.devices))
        for name, component in state.components.items()
        if component.holds
    )
