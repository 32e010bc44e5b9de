"""Plans the processes of a node by its own interpreter, paths and devices."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from dynamo_local.core.errors import UsageError
from dynamo_local.core.fleet.view import ENGINE_ROLES
from dynamo_local.process.forkserver.prepared.orders import withdraw
from dynamo_local.sdk.config.resolved import ResolvedGraph, ResolvedService
from dynamo_local.supervisor.server.launch.blueprint import Blueprint, BlueprintFile
from dynamo_local.supervisor.server.launch.plan import plan_forkserver, plan_watcher, revision_templates
from dynamo_local.supervisor.server.launch.templates import WatcherPlan
from dynamo_local.supervisor.server.private_files import write_private
from state.devices.allocation import Inventory
from state.files import make_private_directory
from state.paths import StatePaths

_MODEL = "model"
_ENGINE = "engine"
_MOCKER = "mocker"


@dataclass(frozen=True)
class NodePlans:
    """Plans of the workers of a graph, and of the endpoints' revisions whose graphs were learned. `node`: its name, for
    errors. `exists`: whether there is such a folder."""

    node: str
    paths: StatePaths
    inventory: Inventory
    blueprint: BlueprintFile
    exists: Callable[[Path], bool] = Path.exists
    _learning: Lock = field(default_factory=Lock, init=False)
    """Held from the look at what is present on: a revision that another thread learns meanwhile would be forgotten."""

    def plan(self, asked: WatcherPlan) -> WatcherPlan:
        """Plan that process for this node, on the devices asked for. Raises UsageError for what cannot run here."""
        watcher = asked.watcher
        template = self.blueprint.current().worker(watcher.service, watcher.revision)
        graph = ResolvedGraph.from_json(self.paths.graph_of(watcher.revision).read_bytes())
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
        if not self.exists(Path(model)):
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
