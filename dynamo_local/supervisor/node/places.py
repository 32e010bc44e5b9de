"""A node as a place: what a node server does for the actuator at the head.

Its statefile tells how far a process is, as the graph's books at the head do for all of them:

    reserved   devices are reserved, nothing runs
    (holding)  the process was started, and the restarter starts it again
    retiring   the process is to end; it is reserved again once it has
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from dynamo_local.core.errors import SupervisorError
from dynamo_local.core.names import Watcher
from dynamo_local.supervisor.places.books import Books
from dynamo_local.supervisor.places.local import LocalPlaces
from dynamo_local.supervisor.places.port import LogPart, Need, Place, Reservation, Status
from dynamo_local.supervisor.server.launch.templates import WatcherPlan
from state.statefile.model import State
from state.statefile.transitions import add_template, claim, entry, retire, unclaim


@dataclass(frozen=True)
class NodePlaces:
    """The node of a node server (port.Places). `plan`: plans a process anew, by the paths of this node; raises
    DynamoError for one that cannot run here. `given_up`: see Place."""

    local: LocalPlaces
    books: Books
    plan: Callable[[WatcherPlan], WatcherPlan]
    given_up: Mapping[str, str] = field(default_factory=dict)

    async def places(self) -> Mapping[str, Place]:
        places = await self.local.places()
        return {node: replace(place, given_up=dict(self.given_up)) for node, place in places.items()}

    async def reserve(self, watcher: Watcher, need: Need) -> Reservation:
        # A suffixed entry stands beside the first of its service, which may be on another node.
        await self.books.update(lambda state: add_template(state, watcher, need.role))
        return await self.local.reserve(watcher, need)

    async def start(self, plan: WatcherPlan) -> None:
        entry = (await self.books.read()).here.get(plan.name)
        if entry is None or not entry.holds or entry.devices != plan.devices:
            raise SupervisorError(f"{plan.name} has not reserved {list(plan.devices)}", "reserve them first")
        planned = replace(self.plan(plan), role=plan.role)
        await self.books.update(lambda state: _started(state, planned))
        await self.local.start(planned)

    async def end(self, watcher: str, deadline_s: float) -> None:
        await self.books.update(lambda state: retire(state, watcher) if _runs(state, watcher) else state)
        await self.local.end(watcher, deadline_s)
        await self.books.update(lambda state: unclaim(state, watcher) if _holds(state, watcher) else state)

    async def release(self, watcher: str) -> None:
        await self.local.release(watcher)

    async def statuses(self) -> Mapping[str, Status]:
        state = await self.books.read()
        return {name: status for name, status in (await self.local.statuses()).items() if _holds(state, name)}

    async def last_error(self, watcher: str) -> str | None:
        return await self.local.last_error(watcher)

    async def log(self, watcher: str, lines: int, after: int | None = None) -> LogPart:
        return await self.local.log(watcher, lines, after)


def _started(state: State, plan: WatcherPlan) -> State:
    """The state in which the process of what is reserved may run. One that was started keeps its role."""
    if entry(state, plan.name).phase != "reserved":
        return state
    return claim(state, plan.watcher, role=plan.role, cmd=shlex.join(plan.argv), devices=plan.devices, share=plan.share)


def _holds(state: State, watcher: str) -> bool:
    entry = state.here.get(watcher)
    return entry is not None and entry.holds


def _runs(state: State, watcher: str) -> bool:
    return _holds(state, watcher) and state.here[watcher].phase != "reserved"
