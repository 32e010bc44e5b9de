"""Plans the watchers of a resolved graph: their commands, environments and devices. Pure."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from dynamo_local.core.errors import ConfigError
from dynamo_local.core.names import (
    BUS_SERVICE,
    FORKSERVER_SERVICE,
    HTTP_HOST_ENV,
    HTTP_PORT_ENV,
    NAMESPACE_ENV,
    WATCHER_ENV,
    Watcher,
)
from dynamo_local.sdk.config.resolved import ResolvedGraph, ResolvedService
from dynamo_local.supervisor.server.templates import ServiceTemplate, WatcherPlan
from state.devices import DEVICES_VARIABLE, Inventory, allocate, environment_for, threads_for
from state.paths import STATE_DIR_VARIABLE

BUS_ROLE = "bus"
FORKSERVER_ROLE = "forkserver"


@dataclass(frozen=True)
class HttpAddress:
    """The address at which the root service listens."""

    host: str
    port: int

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


def service_templates(graph: ResolvedGraph, state_root: Path, http: HttpAddress) -> tuple[ServiceTemplate, ...]:
    """Make the templates of the graph's services, dependencies first. Raises ConfigError when two of their watchers
    cannot exist side by side."""
    _check_names(graph.services)
    _check_root(graph.root)
    return tuple(
        ServiceTemplate(
            service.name,
            service.role,
            _command(graph, service),
            _settings(graph, service, state_root, http),
            service.gpu,
            service.workers,
            service.virtual,
        )
        for service in graph.services
    )


def plan_services(
    namespace: str,
    templates: Sequence[ServiceTemplate],
    inventory: Inventory,
    elsewhere: Mapping[int, str] = MappingProxyType({}),
) -> tuple[WatcherPlan, ...]:
    """Plan the watchers that the services have at start-up, in start order.

    Devices are given out in that order, lowest ids first, without those in `elsewhere`, which others on the machine
    hold. Raises DeviceError when there are too few.
    """
    plans: list[WatcherPlan] = []
    taken: set[int] = set()
    for template in templates:
        for index in range(template.workers):
            others = {} if template.virtual else elsewhere
            devices = allocate(inventory, taken, template.devices, _label(template, index), others)
            taken.update(devices)
            plans.append(plan_watcher(template, Watcher(namespace, template.service, index), inventory, devices))
    return tuple(plans)


def plan_watcher(
    template: ServiceTemplate, watcher: Watcher, inventory: Inventory, devices: tuple[int, ...]
) -> WatcherPlan:
    """Plan one process of the service, on these devices."""
    held = environment_for(inventory, devices)
    # Set even if empty: the server's own environment may name devices, if a process that has some started it.
    held[DEVICES_VARIABLE] = "" if template.virtual else ",".join(inventory.machine_names(devices))
    environment = threads_for(inventory, devices) | template.environment | held | {WATCHER_ENV: str(watcher)}
    return WatcherPlan(watcher, template.role, template.argv, environment, devices)


def plan_bus(namespace: str, argv: tuple[str, ...], state_root: Path) -> WatcherPlan:
    """Plan the watcher of the NATS server that `dynamo serve` starts."""
    watcher = Watcher(namespace, BUS_SERVICE)
    environment = {
        NAMESPACE_ENV: namespace,
        STATE_DIR_VARIABLE: str(state_root),
        WATCHER_ENV: str(watcher),
    }
    return WatcherPlan(watcher, BUS_ROLE, argv, environment)


def plan_forkserver(graph: ResolvedGraph, inventory: Inventory, state_root: Path) -> WatcherPlan | None:
    """Plan the watcher of the fork server; None if no service is to be forked."""
    modules = tuple(dict.fromkeys(service.preload for service in graph.services if service.preload is not None))
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
    nothing that depends on it is left, the fork server and NATS last."""
    order: list[frozenset[str]] = []
    left = {service.name: service.depends_on for service in graph.services}
    while left:
        free = frozenset(left) - {name for names in left.values() for name in names}
        order.append(free)
        left = {name: names for name, names in left.items() if name not in free}
    return (*order, frozenset({FORKSERVER_SERVICE}), frozenset({BUS_SERVICE}))


def _settings(graph: ResolvedGraph, service: ResolvedService, state_root: Path, http: HttpAddress) -> dict[str, str]:
    settings = service.envs | _marks(graph.namespace, state_root)
    if service.name == graph.root.name:
        settings |= {HTTP_HOST_ENV: http.host, HTTP_PORT_ENV: str(http.port)}
    return settings


def _marks(namespace: str, state_root: Path) -> dict[str, str]:
    return {
        NAMESPACE_ENV: namespace,
        STATE_DIR_VARIABLE: str(state_root),
        # Log files are read while the process writes them.
        "PYTHONUNBUFFERED": "1",
    }


def _command(graph: ResolvedGraph, service: ResolvedService) -> tuple[str, ...]:
    module = "dynamo_local.process.main" if service.preload is None else "dynamo_local.process.forkserver.launcher"
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


def _check_root(root: ResolvedService) -> None:
    if root.workers != 1:
        raise ConfigError(
            f"{root.name} listens on the one port of the graph and cannot have {root.workers} workers",
            f"set {root.name}.ServiceArgs.workers to 1",
        )
