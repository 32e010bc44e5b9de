"""What revisions of one server are brought up and ended with."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.names import Revision
from dynamo_local.core.subjects import Subjects
from dynamo_local.supervisor.actuator.actuator import LocalActuator
from dynamo_local.supervisor.endpoints.revisions.files import RevisionFiles
from dynamo_local.supervisor.endpoints.revisions.launch import EndpointLauncher
from dynamo_local.supervisor.endpoints.revisions.memory import MemoryRoom
from dynamo_local.supervisor.endpoints.revisions.observing import RevisionWatch, Spawn
from dynamo_local.supervisor.endpoints.revisions.parking import NotDone
from dynamo_local.supervisor.places.capacity import Capacity
from state.statefile.model import State


class AskToPark(Protocol):
    """Parking.ask."""

    async def __call__(self, revision: Revision, leases: Mapping[str, str], *, parked: bool) -> dict[str, NotDone]: ...


def _anywhere(_: str, amounts: Sequence[float]) -> Sequence[str]:
    return ("",) * len(amounts)


@dataclass(frozen=True)
class RevisionTools:
    """What revisions of one server are brought up and ended with.

    `given_up`: watchers that are not started any more, each with the reason. `actuator(endpoint)`: of that endpoint's
    workers. `memory`: has room made for workers that start. `ask_to_park`: has workers park, or take requests again.
    `frontend_deadline_s`: the time that a frontend has to be ready for a revision that has a worker. `drain_s`: the
    time that requests have to finish which an order ends. `on_failure(revision, error)` is told of each start that has
    failed. `renew`: orders another revision with the same spec. `nodes(endpoint, amounts)`: the only node that each of
    its workers may start on that takes these amounts, empty where any will do, as far as they may start now; blocks.
    `retry_s`: time until a step is tried again that could not be taken, or an end that has failed. `members`: the
    presences of the server's processes, of which `frontends` are to be frontends.
    """

    launcher: EndpointLauncher
    memory: MemoryRoom
    files: RevisionFiles
    watch: Callable[[Subjects, Callable[[], None]], RevisionWatch]
    given_up: Mapping[str, str]
    read_state: Callable[[], State]
    actuator: Callable[[str], Awaitable[LocalActuator]]
    ask_to_park: AskToPark
    on_failure: Callable[[Revision, str], None]
    renew: Callable[[Revision], Awaitable[None]]
    capacity: Capacity
    spawn: Spawn
    namespace: str
    frontend_deadline_s: float
    drain_s: float
    retry_s: float = 1.0
    members: Callable[[], Collection[Presence]] = tuple
    frontends: int = 1
    nodes: Callable[[str, Sequence[float]], Sequence[str]] = _anywhere
    clock: Callable[[], float] = time.monotonic
