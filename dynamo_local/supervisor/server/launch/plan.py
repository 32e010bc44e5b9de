"""Plans the watchers of a resolved graph: their commands, environments and devices; and what a server starts in all.
Pure."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from dynamo_local.bus.address import BusAddress
from dynamo_local.core.addresses import host_in_url
from dynamo_local.core.endpoints.spec import SERVED_NAME, EndpointSpec
from dynamo_local.core.errors import ConfigError
from dynamo_local.core.fleet.view import ENGINE_ROLES, FRONTEND_ROLE
from dynamo_local.core.messages.endpoints import BoardRevision
from dynamo_local.core.names import (
    BUS_SERVICE,
    FIRST_OF_MAIN,
    FORKSERVER_SERVICE,
    HTTP_HOST_ENV,
    HTTP_PORT_ENV,
    LOCAL_NODE,
    NAMESPACE_ENV,
    WATCHER_ENV,
    Watcher,
)
from dynamo_local.core.shares import devices_of, share_of, summed
from dynamo_local.core.sizing.machine import Choice
from dynamo_local.process.forkserver.protocol import FORKSERVER_ENV, PREPARED_ENV
from dynamo_local.process.listener import LISTENER_ENV
from dynamo_local.sdk.config.resolved import ResolvedGraph, ResolvedService
from dynamo_local.supervisor.server.launch.templates import ENDPOINT_WORKERS, ServiceTemplate, WatcherPlan
from state.devices.allocation import DEVICES_VARIABLE, SHARE_VARIABLE, Inventory, allocate, environment_for, threads_for
from state.paths import STATE_DIR_VARIABLE, StatePaths

LOCAL = "local"
"""The environment of workers on this machine: no cluster."""

LOOPBACK = "127.0.0.1"

MOST_FRONTENDS = 32
"""Frontends of one server: half of the places that there are for them (components/frontend/limits/places.py), so that
one that starts finds a place before its predecessor's is free."""

BUS_ROLE = "bus"
FORKSERVER_ROLE = "forkserver"

_LAUNCHER = "dynamo_local.process.forkserver.launcher"


@dataclass(frozen=True)
class HttpAddress:
    """The address at which the root service listens.

    `handover`: name at which the server hands over the socket of the address to frontends (process/listener.py); empty:
    the root service binds the address for itself.
    """

    host: str
    port: int
    handover: str = field(default="", compare=False)

    @property
    def url(self) -> str:
        return f"http://{host_in_url(self.host)}:{self.port}"


def service_templates(graph: ResolvedGraph, state_root: Path, http: HttpAddress) -> tuple[ServiceTemplate, ...]:
    """Make the templates of the graph's services, dependencies first. Raises ConfigError when two of their watchers
    cannot exist side by side."""
    _check_names(graph.services)
    _check_root(graph, http)
    return tuple(
        _template(graph, service, state_root, http, FIRST_OF_MAIN if service.role in ENGINE_ROLES else "")
        for service in graph.services
    )


def hands_over(graph: ResolvedGraph, http: HttpAddress) -> bool:
    """Whether the server hands over the socket of the API. Services that are no frontend bind it for themselves."""
    return bool(http.handover) and graph.root.role == FRONTEND_ROLE


def revision_templates(graph: ResolvedGraph, revision: str, state_root: Path) -> tuple[ServiceTemplate, ...]:
    """Make the templates of an endpoint's revision, from its graph: those of its workers. Its other services are never
    started: frontend, router and planner are the server's own. Raises ConfigError as `service_templates`."""
    _check_names(graph.services)
    workers = (service for service in graph.services if service.role in ENGINE_ROLES)
    return tuple(_template(graph, service, state_root, None, revision) for service in workers)


def plan_services(
    namespace: str,
    templates: Sequence[ServiceTemplate],
    inventory: Inventory,
    elsewhere: Mapping[int, str] = MappingProxyType({}),
) -> tuple[WatcherPlan, ...]:
    """Plan the watchers that the services have at start-up, in start order.

    Devices are given out in that order, lowest ids first, without those in `elsewhere`, which others on the machine
    hold; then shares of devices, the largest first, which leaves the least over. Raises DeviceError when there are too
    few.
    """
    taken: dict[int, float] = {}
    found: dict[Watcher, tuple[int, ...]] = {}
    # Not all workers first and then their devices: somebody may ask for more than a list can have.
    for template in sorted(templates, key=lambda one: -one.share):
        for index in range(template.workers):
            others = {} if template.virtual else elsewhere
            label = _label(template, index)
            devices = allocate(inventory, taken, template.devices, label, others, template.share)
            taken |= {device_id: summed([taken.get(device_id, 0), template.share]) for device_id in devices}
            found[template.watcher(namespace, index)] = devices
    first = [(template, index) for template in templates for index in range(template.workers)]
    watchers = ((template, template.watcher(namespace, index)) for template, index in first)
    return tuple(plan_watcher(template, watcher, inventory, found[watcher]) for template, watcher in watchers)


def plan_watcher(
    template: ServiceTemplate, watcher: Watcher, inventory: Inventory, devices: tuple[int, ...], node: str = LOCAL_NODE
) -> WatcherPlan:
    """Plan one process of the service, on these devices of the node, which has that inventory."""
    held = environment_for(inventory, devices)
    # Set even if empty: the server's own environment may name devices, if a process that has some started it.
    held[SHARE_VARIABLE] = "" if template.share == 1 else f"{template.share:g}"
    held[DEVICES_VARIABLE] = "" if template.virtual else ",".join(inventory.machine_names(devices))
    threads = threads_for(inventory, devices, template.share)
    environment = threads | template.environment | held | {WATCHER_ENV: str(watcher)}
    if _LAUNCHER in template.argv:
        environment |= _sockets(watcher, Path(environment[STATE_DIR_VARIABLE]))
    return WatcherPlan(
        *(watcher, template.role, template.argv, environment, devices, template.share, node, template.revision)
    )


def _sockets(watcher: Watcher, state_root: Path) -> dict[str, str]:
    """Where the launcher of a process asks for a fork."""
    paths = StatePaths(state_root, watcher.namespace)
    return {
        FORKSERVER_ENV: str(paths.forkserver_socket),
        PREPARED_ENV: str(paths.prepared_socket(str(watcher.first))),
    }


def plan_bus(namespace: str, argv: tuple[str, ...], state_root: Path) -> WatcherPlan:
    """Plan the watcher of the NATS server that `dynamo serve` starts."""
    watcher = Watcher(namespace, BUS_SERVICE)
    environment = {
        NAMESPACE_ENV: namespace,
        STATE_DIR_VARIABLE: str(state_root),
        WATCHER_ENV: str(watcher),
    }
    return WatcherPlan(watcher, BUS_ROLE, argv, environment)


def plan_forkserver(
    graph: ResolvedGraph, inventory: Inventory, state_root: Path, services: Collection[str]
) -> WatcherPlan | None:
    """Plan the watcher of the fork server; None if no service is to be forked. `services`: those of this machine."""
    found = (service.preload for service in graph.services if service.name in services)
    modules = tuple(dict.fromkeys(module for module in found if module is not None))
    if not modules:
        return None
    watcher = Watcher(graph.namespace, FORKSERVER_SERVICE)
    # As for a service without devices, except that GPUs are hidden from its forks only: these may need them.
    held = {} if inventory.kind == "gpu" else environment_for(inventory, ())
    environment = held | _marks(graph.namespace, state_root) | {WATCHER_ENV: str(watcher)}
    command = (sys.executable, "-m", "dynamo_local.process.forkserver", "--namespace", graph.namespace, *modules)
    return WatcherPlan(watcher, FORKSERVER_ROLE, command, environment)


def stop_order(graph: ResolvedGraph) -> tuple[frozenset[str], ...]:
    """Services in stop order, grouped by those that stop at the same time: the root first, then each service once
    nothing that depends on it is left, the fork server and NATS last. The workers of endpoints stop after the root."""
    order: list[frozenset[str]] = []
    left = {service.name: service.depends_on for service in graph.services}
    while left:
        free = frozenset(left) - {name for names in left.values() for name in names}
        order.append(free)
        left = {name: names for name, names in left.items() if name not in free}
    root, *others = order
    return (root, frozenset({ENDPOINT_WORKERS}), *others, frozenset({FORKSERVER_SERVICE}), frozenset({BUS_SERVICE}))


def _template(
    graph: ResolvedGraph, service: ResolvedService, state_root: Path, http: HttpAddress | None, revision: str
) -> ServiceTemplate:
    return ServiceTemplate(
        service.name,
        service.role,
        _command(graph, service),
        _settings(graph, service, state_root, http),
        devices_of(service.gpu),
        service.workers,
        service.virtual,
        revision,
        share_of(service.gpu),
    )


def _settings(
    graph: ResolvedGraph, service: ResolvedService, state_root: Path, http: HttpAddress | None
) -> dict[str, str]:
    settings = service.envs | _marks(graph.namespace, state_root)
    if http is not None and service.name == graph.root.name:
        settings |= {HTTP_HOST_ENV: http.host, HTTP_PORT_ENV: str(http.port)}
        if hands_over(graph, http):
            settings[LISTENER_ENV] = http.handover
    return settings


def _marks(namespace: str, state_root: Path) -> dict[str, str]:
    return {
        NAMESPACE_ENV: namespace,
        STATE_DIR_VARIABLE: str(state_root),
        # Log files are read while the process writes them.
        "PYTHONUNBUFFERED": "1",
    }


def _command(graph: ResolvedGraph, service: ResolvedService) -> tuple[str, ...]:
    module = "dynamo_local.process.main" if service.preload is None else _LAUNCHER
    return (sys.executable, "-m", module, "--namespace", graph.namespace, "--service", service.name)


def _label(template: ServiceTemplate, index: int) -> str:
    name, workers = template.service, template.workers
    return name if workers == 1 else f"worker {index + 1} of {workers} of {name}"


def _check_names(services: Sequence[ResolvedService]) -> None:
    seen: dict[str, str] = {}
    for service in services:
        # circus ignores case in the names of watchers.
        other = seen.setdefault(service.name.lower(), service.name)
        if other != service.name:
            raise ConfigError(
                f"services {other} and {service.name} differ in upper and lower case only",
                "rename one of them",
            )


def _check_root(graph: ResolvedGraph, http: HttpAddress) -> None:
    root, most = graph.root, MOST_FRONTENDS if hands_over(graph, http) else 1
    if not 1 <= root.workers <= most:
        raise ConfigError(
            f"{root.name} listens on the one port of the graph and cannot have {root.workers} workers",
            f"set {root.name}.ServiceArgs.workers to {'1' if most == 1 else f'a number from 1 to {most}'}",
        )


@dataclass(frozen=True)
class Launch:
    """What a server starts, as `prepare` decides. `templates` are the services, `services` their first watchers.

    `bus`: the NATS server to use; None if the server is to start its own, which listens on `bus_host`. `endpoints` and
    `forget`: as in the request. `devices`: those of this machine; None: as `inventory`.
    `chosen`: what was chosen where nothing is given."""

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
    chosen: tuple[Choice, ...] = ()

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


def main_on_board(graph: ResolvedGraph) -> tuple[BoardRevision, ...]:
    """What frontends are to serve of a graph with workers; nothing of another one."""
    if not any(service.role in ENGINE_ROLES for service in graph.services):
        return ()
    config = next((service.config for service in graph.services if service.role == FRONTEND_ROLE), {})
    names = config.get(SERVED_NAME) or [config["model"]] if config.get("model") else []
    return (BoardRevision(FIRST_OF_MAIN, takes_requests=True, served_names=tuple(map(str, names))),)


def here(templates: Sequence[ServiceTemplate], *, clustered: bool) -> tuple[ServiceTemplate, ...]:
    """The templates whose processes are on the machine of the server."""
    return tuple(one for one in templates if not clustered or one.role not in ENGINE_ROLES)


def _package(module: str) -> str:
    return module.rpartition(".")[0].rpartition(".")[2] or module
