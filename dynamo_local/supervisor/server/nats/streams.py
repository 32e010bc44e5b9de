"""Creates what a server's processes need on the bus, its prefill queue and its live settings, and deletes both.

Only the owner of the namespace does either (ownership.py)."""

from __future__ import annotations

import asyncio

from dynamo_local.bus.address import BusAddress
from dynamo_local.bus.jetstream.live_settings import create_settings, delete_settings
from dynamo_local.bus.jetstream.owner_record import BusRecord
from dynamo_local.bus.jetstream.prefill_queue import PrefillQueue, create_prefill_queue, delete_prefill_queue
from dynamo_local.bus.nats import Bus
from dynamo_local.core.errors import BusError, NamespaceBusyError, SupervisorError
from dynamo_local.core.fleet.view import PREFILL_ROLE
from dynamo_local.core.names import FIRST_OF_MAIN
from dynamo_local.core.subjects import Subjects
from dynamo_local.sdk.config.resolved import ResolvedGraph
from dynamo_local.supervisor.server.ownership import Ownership
from dynamo_local.supervisor.server.reports.report import Report

_CONNECT_WITHIN_S = 2.0
_POLL_S = 0.5
_DRAINED_LOOKS = 60
"""Number of looks at the jobs that wait, for the workers to take them. Jobs that are left then are given up by their
frontends, whose decode workers prefill."""


def needs_queue(graph: ResolvedGraph) -> bool:
    """Whether the graph has a service that takes prefill jobs."""
    return any(service.role == PREFILL_ROLE for service in graph.services)


class ServerStreams:
    """The prefill queues and the live settings of one server. Each revision has a queue of its own.

    `own_nats`: they are on a NATS server that it has started, and that ends with it.
    """

    def __init__(self, graph: ResolvedGraph, report: Report, ownership: Ownership, *, own_nats: bool = False) -> None:
        self._own_nats = own_nats
        self._graph = graph
        self._subjects = Subjects(graph.namespace)
        self._report = report
        self._ownership = ownership
        self._queues: list[Subjects] = []
        self._has_settings = False
        self._bus: Bus | None = None

    async def create(self, bus: Bus) -> None:
        """Create what the graph needs, in place of what an earlier server has left.

        Raises NamespaceBusyError if another server owns the namespace, SupervisorError if there can be no queue for a
        graph that needs one. Without live settings a server still
        serves: that is only reported.
        """
        self._bus = bus
        await self._create_queue(bus, self._graph, Subjects(self._subjects.namespace, FIRST_OF_MAIN))
        try:
            await self._confirm(bus)
            await create_settings(bus, self._subjects)
        except BusError as error:
            self._report.step(f"settings cannot be changed while the server runs: {error}")
        else:
            self._has_settings = True

    async def create_streams(self, bus: Bus, graph: ResolvedGraph, revision: str) -> None:
        """Create what the graph of an endpoint's revision needs. Raises SupervisorError if there can be no queue."""
        await self._create_queue(bus, graph, Subjects(self._subjects.namespace, revision))

    async def delete_streams(self, bus: Bus, revision: str) -> None:
        """Delete what `create_streams` has created. Harmless if there is nothing. A failure is only reported: it is
        deleted when the server ends."""
        subjects = Subjects(self._subjects.namespace, revision)
        if subjects not in self._queues:
            return
        try:
            await self._confirm(bus)
            await delete_prefill_queue(bus, subjects)
        except (BusError, NamespaceBusyError) as error:
            self._report.step(f"the prefill queue of {revision} is left on the bus for now: {error}")
        else:
            self._queues.remove(subjects)

    async def renew(self) -> None:
        """Replace the prefill queues by new ones, once no job waits in them. For a disk that was full and has room
        again.

        A failure is only reported: until the next restart, decode workers then prefill all prompts.
        """
        # NATS refuses to store in a stream for which one write has failed, also when there is room again.
        if self._bus is not None:
            await asyncio.gather(*(self._renew(self._bus, subjects) for subjects in tuple(self._queues)))

    async def delete(self, address: BusAddress) -> None:
        """Delete what `create` has created, by a connection of its own. Failures are only reported: the next server
        replaces what is left."""
        if not (self._queues or self._has_settings):
            return
        try:
            bus = await Bus.connect(address, name="supervisor", deadline_s=_CONNECT_WITHIN_S)
            try:
                for subjects in self._queues:
                    await self._confirm(bus)
                    await delete_prefill_queue(bus, subjects)
                if self._has_settings:
                    await self._confirm(bus)
                    await delete_settings(bus, self._subjects)
            finally:
                await bus.close()
        except (BusError, NamespaceBusyError) as error:
            self._report.step(f"queue and settings are left on the bus: {error}")

    async def _confirm(self, bus: Bus) -> None:
        """Make sure to be the owner. Raises as `Ownership.confirm`."""
        await self._ownership.confirm(self.record(bus))

    def record(self, bus: Bus) -> BusRecord:
        """The record of the namespace's owner."""
        # On disk, the record would be the first that a full disk closes, and what only the owner may do, such as to
        # make the queue anew, would wait for it for ever.
        return BusRecord(bus, self._subjects.namespace, in_memory=self._own_nats)

    async def _create_queue(self, bus: Bus, graph: ResolvedGraph, subjects: Subjects) -> None:
        if not needs_queue(graph):
            return
        try:
            await self._confirm(bus)
            await create_prefill_queue(bus, subjects)
        except BusError as error:
            raise SupervisorError(f"no prefill queue: {error.cause}", error.remedy) from error
        if subjects not in self._queues:
            self._queues.append(subjects)

    async def _renew(self, bus: Bus, subjects: Subjects) -> None:
        try:
            queue = PrefillQueue(bus, subjects)
            for _ in range(_DRAINED_LOOKS):
                if not (await queue.length()).waiting:
                    break
                await asyncio.sleep(_POLL_S)
            # It may have been deleted meanwhile, with the revision that it belongs to.
            if subjects in self._queues:
                await self._confirm(bus)
                await create_prefill_queue(bus, subjects)
        except (BusError, NamespaceBusyError) as error:
            self._report.step(f"the prefill queue cannot be made anew: {error}")
