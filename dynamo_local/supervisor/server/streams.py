"""Creates what a server's processes need on the bus, its prefill queue and its live settings, and deletes both."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from dynamo_local.bus.live_settings import create_settings, delete_settings
from dynamo_local.bus.nats import Bus, BusAddress
from dynamo_local.bus.prefill_queue import PrefillQueue, create_prefill_queue, delete_prefill_queue
from dynamo_local.core.errors import BusError, SupervisorError
from dynamo_local.core.fleet.view import PREFILL_ROLE
from dynamo_local.core.names import Subjects
from dynamo_local.sdk.config.resolved import ResolvedGraph
from dynamo_local.supervisor.server.report import Report

_CONNECT_WITHIN_S = 2.0
_POLL_S = 0.5
_DRAINED_LOOKS = 60
"""Number of looks at the jobs that wait, for the workers to take them. Jobs that are left then are given up by their
frontends, whose decode workers prefill."""

_Delete = Callable[[Bus, Subjects], Awaitable[bool]]


def needs_queue(graph: ResolvedGraph) -> bool:
    """Whether the graph has a service that takes prefill jobs."""
    return any(service.role == PREFILL_ROLE for service in graph.services)


class ServerStreams:
    """The prefill queue and the live settings of one server."""

    def __init__(self, graph: ResolvedGraph, report: Report) -> None:
        self._needs_queue = needs_queue(graph)
        self._subjects = Subjects(graph.namespace)
        self._report = report
        self._created: list[_Delete] = []
        self._bus: Bus | None = None

    async def create(self, bus: Bus) -> None:
        """Create what the graph needs, in place of what an earlier server has left.

        Raises SupervisorError if there can be no queue for a graph that needs one. Without live settings a server still
        serves: that is only reported.
        """
        self._bus = bus
        if self._needs_queue:
            try:
                await create_prefill_queue(bus, self._subjects)
            except BusError as error:
                raise SupervisorError(f"no prefill queue: {error.cause}", error.remedy) from error
            self._created.append(delete_prefill_queue)
        try:
            await create_settings(bus, self._subjects)
        except BusError as error:
            self._report.step(f"settings cannot be changed while the server runs: {error}")
        else:
            self._created.append(delete_settings)

    async def renew(self) -> None:
        """Replace the prefill queue by a new one, once no job waits in it. For a disk that was full and has room again.

        A failure is only reported: until the next restart, decode workers then prefill all prompts.
        """
        # NATS refuses to store in a stream for which one write has failed, also when there is room again.
        if not self._needs_queue or self._bus is None:
            return
        try:
            queue = PrefillQueue(self._bus, self._subjects)
            for _ in range(_DRAINED_LOOKS):
                if not (await queue.length()).waiting:
                    break
                await asyncio.sleep(_POLL_S)
            await create_prefill_queue(self._bus, self._subjects)
        except BusError as error:
            self._report.step(f"the prefill queue cannot be made anew: {error}")

    async def delete(self, address: BusAddress) -> None:
        """Delete what `create` has created, by a connection of its own. Failures are only reported: the next server
        replaces what is left."""
        if not self._created:
            return
        try:
            bus = await Bus.connect(address, name="supervisor", deadline_s=_CONNECT_WITHIN_S)
            try:
                for delete in self._created:
                    await delete(bus, self._subjects)
            finally:
                await bus.close()
        except BusError as error:
            self._report.step(f"queue and settings are left on the bus: {error}")
