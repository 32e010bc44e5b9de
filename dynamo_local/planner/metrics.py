"""Pulls the planner's observations from the statefile, the presences and the prefill queue.

Reads only: a stream that does not exist is not created. What cannot be read is unknown, never zero.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from dynamo_local.bus.nats import Bus
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core.fleet.view import ENGINE_ROLES, PREFILL_ROLE
from dynamo_local.core.planning.observation import Observation, observe
from dynamo_local.core.subjects import Subjects
from dynamo_local.planner.queue_reader import QueueReader
from dynamo_local.planner.server_state import StateReader


class FleetMetrics:
    """Pulls observations of one running server. `watch` is started and run by its owner.

    `templates`: by role, the service whose workers start in it. `taken` returns the devices that endpoints have been
    promised, whose workers may still be to start.
    """

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        watch: FleetWatch,
        state: StateReader,
        templates: Mapping[str, str],
        taken: Callable[[], float] = lambda: 0,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bus = bus
        self._watch = watch
        self._state = state
        self._templates = {role: service for role, service in templates.items() if role in ENGINE_ROLES}
        self._taken = taken
        self._queue = QueueReader(bus, subjects)
        self._clock = clock

    async def pull(self) -> Observation:
        """Return an observation of the fleet now. Raises NotRunningError when the server has ended."""
        state = await self._state.read()
        queue = await self._queue.read() if PREFILL_ROLE in self._templates else None
        if not self._bus.connected:
            # After the awaits above, during which the connection may have been lost.
            state = None
        view = self._watch.view
        return observe(
            at=self._clock(),
            claims=None if state is None else state.claims_of(""),
            members=view.members(),
            routable=view.ready(ENGINE_ROLES),
            queue=queue,
            templates=self._templates,
            inventory=None if state is None else state.inventory,
            taken=0 if state is None else max(state.devices_of_endpoints, self._taken()),
        )
