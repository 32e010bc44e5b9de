"""What a server starts: the decisions of `prepare.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynamo_local.bus.address import BusAddress
from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.fleet.view import ENGINE_ROLES
from dynamo_local.sdk.config.resolved import ResolvedGraph
from dynamo_local.supervisor.server.launch.addresses import LOOPBACK
from dynamo_local.supervisor.server.launch.plan import HttpAddress
from dynamo_local.supervisor.server.launch.templates import ServiceTemplate, WatcherPlan
from state.devices.allocation import Inventory
from state.paths import StatePaths

LOCAL = "local"
"""The environment of workers on this machine: no cluster."""


@dataclass(frozen=True)
class Launch:
    """The decisions of `prepare`. `templates` are the services, `services` their first watchers. `bus`: the NATS server
    to use; None if the server is to start its own, which listens on `bus_host`.
    `endpoints` and `forget`: as in the request. `devices`: those of this machine; None: as `inventory`."""

    graph: ResolvedGraph
    inventory: Inventory
    paths: StatePaths
    bus: BusAddress | None
    http: HttpAddress
    templates: tuple[ServiceTemplate, ...]
    services: tuple[WatcherPlan, ...]
    forkserver: WatcherPlan | None = None
    endpoints: tuple[EndpointSpec, ...] = ()
    forget: bool = False
    bus_host: str = LOOPBACK
    environment: str = LOCAL
    cluster_address: str | None = None
    devices: Inventory | None = None

    @property
    def probed(self) -> Inventory:
        """The devices of this machine, by which settings are chosen, whether workers are to live on them or not."""
        return self.devices or self.inventory

    @property
    def clustered(self) -> bool:
        """Whether workers live on the nodes of a cluster. `services` and `inventory` are without them then."""
        return self.environment != LOCAL

    @property
    def own_templates(self) -> tuple[ServiceTemplate, ...]:
        """The templates of the services whose processes are on this machine."""
        return here(self.templates, clustered=self.clustered)

    @property
    def importing(self) -> dict[str, str]:
        """What the processes of each watcher import before they start, for those that are forked from the fork server:
        the package of the module that it preloads, such as "vllm"."""
        if self.forkserver is None:
            return {}
        preloads = {service.name: service.preload for service in self.graph.services}
        found = {plan.name: preloads[plan.watcher.service] for plan in self.services}
        return {watcher: _package(module) for watcher, module in found.items() if module is not None}


def here(templates: Sequence[ServiceTemplate], *, clustered: bool) -> tuple[ServiceTemplate, ...]:
    """The templates whose processes are on the machine of the server."""
    return tuple(one for one in templates if not clustered or one.role not in ENGINE_ROLES)


def _package(module: str) -> str:
    return module.rpartition(".")[0].rpartition(".")[2] or module
