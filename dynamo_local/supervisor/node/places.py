"""A node as a place: what a node server does for the actuator at the head.

Its statefile tells how far a process is, as the graph's books at the head do for all of them:

    reserved   devices are reserved, nothing runs
    (holding)  the process was started, and the restarter starts it again
    retiring   the process is to end; it is reserved again once it has
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from msgspec.structs import replace

from dynamo_local.core.errors import UsageError
from dynamo_local.core.fleet.view import ENGINE_ROLES
from dynamo_local.core.names import Watcher
from dynamo_local.process.forkserver.prepared.orders import withdraw
from dynamo_local.sdk.config.resolved import ResolvedGraph, ResolvedService
from dynamo_local.supervisor.places.local import LocalPlaces
from dynamo_local.supervisor.places.port import Need, Place, Slot, Status
from dynamo_local.supervisor.server.launch.blueprint import Blueprint, BlueprintFile
from dynamo_local.supervisor.server.launch.plan import plan_forkserver, plan_watcher, revision_templates
from dynamo_local.supervisor.server.launch.templates import WatcherPlan
from state.devices.allocation import Inventory
from state.files import make_private_directory, write_private
from state.paths import StatePaths
from state.statefile.model import State
from state.statefile.transitions import add_template, claim, entry, retire, unclaim

# Plans the processes of a node by its own interpreter, paths and devices.

_MODEL = "model"
_ENGINE = "engine"
_MOCKER = "mocker"


@dataclass(frozen=True)
class NodePlans:
    """Plans of the workers of the revisions whose graphs were learned. `node`: its name, for errors."""

    node: str
    paths: StatePaths
    inventory: Inventory
    blueprint: BlueprintFile
    _learning: Lock = field(default_factory=Lock, init=False)
    """Held from the look at what is present on: a revision that another thread learns meanwhile would be forgotten."""

    def plan(self, asked: WatcherPlan) -> WatcherPlan:
        """Plan that process for this node, on the devices asked for. Raises UsageError for what cannot run here."""
        watcher = asked.watcher
        template = self.blueprint.current().worker(watcher.service, asked.revision)
        graph = ResolvedGraph.from_json(self.paths.graph_of(asked.revision).read_bytes())
        self._check_model(graph.service(watcher.service))
        return plan_watcher(template, watcher, self.inventory, asked.devices)

    def learn(self, revision: str, data: bytes, present: Callable[[], Collection[str]]) -> None:
        """Take the graph of an endpoint's revision, and forget those that are not `present`: nothing is reserved for
        workers of them here, and they are learned again for the next one. Blocks. Raises DecodeError for what is no
        graph, and what `present` raises."""
        graph = ResolvedGraph.from_json(data)
        with self._learning:
            self._learn(revision, graph, data, present())

    def _learn(self, revision: str, graph: ResolvedGraph, data: bytes, present: Collection[str]) -> None:
        path = self.paths.graph_of(revision)
        make_private_directory(path.parent)
        write_private(path, data)
        templates = revision_templates(graph, revision, self.paths.root)
        over = self.blueprint.current().revisions.difference(present, {revision})
        self.blueprint.change(lambda blueprint: _without(blueprint, over).with_revision(templates))
        for former in over:
            self.paths.graph_of(former).unlink(missing_ok=True)
            withdraw(self.paths, former)

    def _check_model(self, service: ResolvedService) -> None:
        model = service.config.get(_MODEL)
        if service.config.get(_ENGINE) == _MOCKER or not isinstance(model, str) or not Path(model).is_absolute():
            return
        if not Path(model).exists():
            raise UsageError(f"node {self.node} has no {model}", "have the model in the same folder on all nodes")


def _without(blueprint: Blueprint, revisions: Iterable[str]) -> Blueprint:
    for revision in revisions:
        blueprint = blueprint.without_revision(revision)
    return blueprint


def forkserver_of(graph: ResolvedGraph, inventory: Inventory, root: Path) -> WatcherPlan | None:
    """Plan the fork server of a node: for the graph's workers alone. Where it has none, those of endpoints live there,
    which need what its frontend does."""
    workers = {service.name for service in graph.services if service.role in ENGINE_ROLES}
    return plan_forkserver(graph, inventory, root, workers or {service.name for service in graph.services})


@dataclass(frozen=True)
class NodePlaces(LocalPlaces):
    """The node of a node server (port.Places). `plan`: plans a process anew, by the paths of this node; raises
    DynamoError for one that cannot run here. `given_up`: see Place."""

    plan: Callable[[WatcherPlan], WatcherPlan]
    given_up: Mapping[str, str] = field(default_factory=dict)

    async def places(self) -> Mapping[str, Place]:
        places = await super().places()
        return {node: replace(place, given_up=dict(self.given_up)) for node, place in places.items()}

    async def reserve(self, watcher: Watcher, need: Need) -> Slot:
        # A suffixed entry stands beside the first of its service, which may be on another node.
        await self.books.update(lambda state: add_template(state, watcher, need.role, need.revision))
        return await super().reserve(watcher, need)

    async def start(self, plan: WatcherPlan) -> None:
        await self._check_reserved(plan)
        planned = replace(self.plan(plan), role=plan.role)
        await self.books.update(lambda state: _started(state, planned))
        await super().start(planned)

    async def end(self, watcher: str, deadline_s: float) -> None:
        await self.books.update(lambda state: retire(state, watcher) if _runs(state, watcher) else state)
        await super().end(watcher, deadline_s)
        await self.books.update(lambda state: unclaim(state, watcher) if _holds(state, watcher) else state)

    async def statuses(self) -> Mapping[str, Status]:
        state = await self.books.read()
        return {name: status for name, status in (await super().statuses()).items() if _holds(state, name)}


def _started(state: State, plan: WatcherPlan) -> State:
    """The state in which the process of what is reserved may run. One that was started keeps its role."""
    if entry(state, plan.name).phase != "reserved":
        return state
    return claim(
        *(state, plan.watcher),
        role=plan.role,
        cmd=shlex.join(plan.argv),
        devices=plan.devices,
        share=plan.share,
        revision=plan.revision,
    )


def _holds(state: State, watcher: str) -> bool:
    entry = state.here.get(watcher)
    return entry is not None and entry.holds


def _runs(state: State, watcher: str) -> bool:
    return _holds(state, watcher) and state.here[watcher].phase != "reserved"
