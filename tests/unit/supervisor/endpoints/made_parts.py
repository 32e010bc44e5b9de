"""Parts of a server that runs nothing, of which a test gives those that it is about."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from dynamo_local.core.endpoints.turns import Limits
from dynamo_local.core.fleet.view import FleetView
from dynamo_local.core.messages.reports import Event
from dynamo_local.core.names import Revision
from dynamo_local.supervisor.endpoints.awake import KeptUsage
from dynamo_local.supervisor.endpoints.parts import EndpointParts
from dynamo_local.supervisor.endpoints.revisions.observing import RevisionWatch
from dynamo_local.supervisor.endpoints.turns import TurnKeeper
from dynamo_local.supervisor.places.capacity import Capacity, MachineCapacity, MachineFacts
from state.devices.allocation import cpu_slots
from state.statefile.model import State
from tests.unit.state.builders import empty_state
from tests.unit.supervisor.recording import RecordingReport


@dataclass
class Record:
    """What is noted of endpoints (record.EndpointRecord)."""

    told: list[tuple[str, str, str]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def happened(self, endpoint: str, what: str, why: str = "") -> None:
        self.told.append((endpoint, what, why))

    def note(self, event: Event) -> None:
        self.events.append(event)

    def log(self, event: Event) -> None:
        self.events.append(event)


class Board:
    """A board that nobody reads (board.BoardWriter)."""

    async def publish(self) -> None:
        pass

    def touch(self) -> None:
        pass


class Tasks:
    """Background tasks that nobody waits for (TaskGuard)."""

    def spawn(self, name: str, work: Any) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(work, name=name)


class Deaf:
    """A watch that hears nobody (revisions.observing.RevisionWatch)."""

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        pass

    @property
    def view(self) -> FleetView:
        return FleetView()


class PartsWithoutBus(EndpointParts):
    def watch(self, revision: Revision, on_change: Callable[[], None]) -> RevisionWatch:
        return cast("RevisionWatch", Deaf())


def keeper_of(capacity: object, read: Callable[[], State] = empty_state) -> TurnKeeper:
    """Of a server without endpoints."""
    registration, nothing = SimpleNamespace(read=read), cast("Any", None)
    return TurnKeeper(
        {}, cast("Any", registration), cast("Capacity", capacity), nothing, cast("Any", Record()), Limits()
    )


def parts_of(
    *,
    read: Callable[[], State] = empty_state,
    actuators: object = None,
    gone: Callable[[], Mapping[int, str]] = dict,
    **given: Any,
) -> EndpointParts:
    """`read`: reads the statefile. `actuators`: makes actuators. `gone`: devices that are not there any more."""
    facts = MachineFacts(gone=lambda _: gone())
    capacity = MachineCapacity(cpu_slots([0], 1), facts)
    server = SimpleNamespace(
        registration=SimpleNamespace(read=read),
        actuators=actuators,
        given_up={},
        members=tuple,
        report=RecordingReport(),
        settings=SimpleNamespace(ready_deadline_s=1, drain_deadline_s=1),
        launch=SimpleNamespace(graph=SimpleNamespace(root=SimpleNamespace(workers=1))),
    )
    made: dict[str, Any] = {
        "server": server,
        "tasks": Tasks(),
        "kept": None,
        "launcher": None,
        "memory": None,
        "files": None,
        "parking": None,
        "capacity": capacity,
        "facts": facts,
        "board": Board(),
        "record": Record(),
        "usage": KeptUsage(cast("Any", None), RecordingReport(), lambda: 0.0),
        "turns": keeper_of(capacity, read),
        "retry_s": 0.0,
    }
    return PartsWithoutBus(**(made | given))


def endpoint_of(look: Callable[[], None], renew: object = None) -> Any:
    """An endpoint that is told to look, and to order another revision in place of one (endpoint.EndpointRun)."""
    return SimpleNamespace(look=look, renew=renew)
