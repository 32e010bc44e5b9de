"""The parts of a server that its endpoints and their revisions work with."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from dynamo_local.core.names import Revision
from dynamo_local.core.subjects import Subjects
from dynamo_local.supervisor.actuator.actuator import LocalActuator
from dynamo_local.supervisor.endpoints.awake import KeptUsage
from dynamo_local.supervisor.endpoints.board import BoardWriter
from dynamo_local.supervisor.endpoints.kept_registry import KeptRegistry
from dynamo_local.supervisor.endpoints.record import EndpointRecord
from dynamo_local.supervisor.endpoints.revisions.launch import EndpointLauncher, RevisionFiles
from dynamo_local.supervisor.endpoints.revisions.memory import MemoryRoom
from dynamo_local.supervisor.endpoints.revisions.observing import RevisionWatch
from dynamo_local.supervisor.endpoints.revisions.parking import Parking
from dynamo_local.supervisor.endpoints.turns import TurnKeeper
from dynamo_local.supervisor.places.capacity import Capacity, MachineFacts
from dynamo_local.supervisor.server.controlled import ControlledServer
from dynamo_local.tasks import TaskGuard


@dataclass(frozen=True)
class EndpointParts:
    """`usage`: when endpoints were used. `memory`: has room made for workers that start. `retry_s`: time until a step
    is tried again that could not be taken, or an end that has failed."""

    server: ControlledServer
    tasks: TaskGuard
    kept: KeptRegistry
    launcher: EndpointLauncher
    memory: MemoryRoom
    files: RevisionFiles
    parking: Parking
    capacity: Capacity
    facts: MachineFacts
    board: BoardWriter
    record: EndpointRecord
    usage: KeptUsage
    turns: TurnKeeper
    retry_s: float = 1.0
    clock: Callable[[], float] = time.monotonic
    wall_clock: Callable[[], float] = time.time

    async def actuator(self, endpoint: str) -> LocalActuator:
        """An actuator for the endpoint's workers."""
        return await self.server.actuators.of(endpoint, self.server.report, gone=self.facts.gone)

    def watch(self, revision: Revision, on_change: Callable[[], None]) -> RevisionWatch:
        """A view of the revision's processes."""
        subjects = Subjects(self.server.launch.paths.namespace, str(revision))
        return RevisionWatch(self.server.bus, subjects, on_change, self.tasks.spawn)
