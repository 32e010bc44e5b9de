"""Pulls the planner's observations from the statefile, the presences and the prefill queue.

Reads only: a stream that does not exist is not created. What cannot be read is unknown, never zero.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from dynamo_local.bus.nats import Bus
from dynamo_local.bus.prefill_queue import PrefillQueue
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core.errors import BusError, NotRunningError, StateError
from dynamo_local.core.fleet.view import ENGINE_ROLES, PREFILL_ROLE
from dynamo_local.core.names import Subjects
from dynamo_local.core.planning.observation import Claim, Observation, QueueReading, observe
from state.model import State
from state.store import StateStore, server_pid

_log = logging.getLogger(__name__)


class FleetMetrics:
    """Pulls observations of one running server. `watch` is started and run by its owner.

    `templates`: by role, the service whose workers start in it. `inventory` returns the number of devices for the
    server of a state; a call may block for milliseconds.
    """

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        watch: FleetWatch,
        store: StateStore,
        templates: Mapping[str, str],
        inventory: Callable[[State], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bus = bus
        self._watch = watch
        self._store = store
        self._templates = {role: service for role, service in templates.items() if role in ENGINE_ROLES}
        self._inventory = inventory
        self._queue = PrefillQueue(bus, subjects)
        self._clock = clock
        self._unread: set[str] = set()
        """Sources that could not be read at the last pull: each is logged once, not at every pull."""

    async def pull(self) -> Observation:
        """Return an observation of the fleet now. Raises NotRunningError when the server has ended."""
        claims, inventory = await self._claims()
        queue = await self._queue_length()
        view = self._watch.view
        return observe(
            at=self._clock(),
            # After the awaits above, during which the connection may have been lost.
            claims=claims if self._bus.connected else None,
            members=view.members(),
            routable=view.ready(ENGINE_ROLES),
            queue=queue,
            templates=self._templates,
            inventory=inventory,
        )

    async def _claims(self) -> tuple[tuple[Claim, ...] | None, int | None]:
        """Return the workers' claims and the number of devices; None for both if the statefile cannot be read."""

        def read() -> tuple[State, int]:
            state = self._store.read()
            return state, self._inventory(state)

        try:
            state, inventory = await asyncio.to_thread(read)
        except (NotRunningError, StateError) as error:
            if isinstance(error, NotRunningError) and await asyncio.to_thread(server_pid, self._store.paths) is None:
                raise
            self._missed("statefile", error)
            return None, None
        self._unread.discard("statefile")
        return claims_of(state), inventory

    async def _queue_length(self) -> QueueReading | None:
        if PREFILL_ROLE not in self._templates or not self._bus.connected:
            return None
        try:
            length = await self._queue.length()
        except BusError as error:
            self._missed("prefill queue", error)
            return None
        self._unread.discard("prefill queue")
        return QueueReading(length.waiting, length.in_hand)

    def _missed(self, what: str, why: Exception) -> None:
        if what not in self._unread:
            self._unread.add(what)
            _log.warning("the %s cannot be read: %s", what, why)


def claims_of(state: State) -> tuple[Claim, ...]:
    """Return the claims of workers that run, start, restart or end."""
    return tuple(
        Claim(name, component.role, len(component.devices), retiring=component.phase == "retiring")
        for name, component in state.components.items()
        if component.holds and component.role in ENGINE_ROLES
    )
