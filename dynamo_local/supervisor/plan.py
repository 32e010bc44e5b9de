"""Which watchers a resolved graph becomes, with which devices, commands and settings. Pure."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dynamo_local.core.errors import ConfigError
from dynamo_local.core.names import (
    BUS_SERVICE,
    HTTP_HOST_ENV,
    HTTP_PORT_ENV,
    NAMESPACE_ENV,
    WATCHER_ENV,
    Watcher,
)
from dynamo_local.sdk.resolved import ResolvedGraph, ResolvedService
from state.devices import Inventory, allocate, environment_for, threads_for
from state.paths import STATE_DIR_VARIABLE

BUS_ROLE = "bus"


@dataclass(frozen=True)
class HttpAddress:
    """Where the root service listens."""

    host: str
    port: int

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


@dataclass(frozen=True)
class WatcherPlan:
    """One process to be. `environment` is added to that of the server; what it says wins."""

    watcher: Watcher
    role: str
    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return str(self.watcher)


def plan_services(
    graph: ResolvedGraph, inventory: Inventory, state_root: Path, http: HttpAddress
) -> tuple[WatcherPlan, ...]:
    """The watchers of a graph's services, dependencies first: the order to start them in.

    Devices go to services in that order, lowest ids first. Raises DeviceError when there are too few,
    ConfigError when two watchers cannot exist side by side.
    """
    _check_names(graph.services)
    _check_root(graph.root)
    plans: list[WatcherPlan] = []
    taken: set[int] = set()
    for service in graph.services:
        settings = _settings(graph, service, state_root, http)
        for index in range(service.workers):
            watcher = Watcher(graph.namespace, service.name, index)
            devices = allocate(inventory, taken, service.gpu, needed_by=_label(service, index))
            taken.update(devices)
            held = environment_for(inventory, devices)
            environment = threads_for(inventory, devices) | settings | held | {WATCHER_ENV: str(watcher)}
            plans.append(WatcherPlan(watcher, service.role, _command(graph, service), environment, devices))
    return tuple(plans)


def plan_bus(namespace: str, argv: tuple[str, ...], state_root: Path) -> WatcherPlan:
    """The watcher of our own NATS server."""
    watcher = Watcher(namespace, BUS_SERVICE)
    environment = {
        NAMESPACE_ENV: namespace,
        STATE_DIR_VARIABLE: str(state_root),
        WATCHER_ENV: str(watcher),
    }
    return WatcherPlan(watcher, BUS_ROLE, argv, environment)


def stop_order(graph: ResolvedGraph) -> tuple[str, ...]:
    """Services in the order they are to stop: who is depended on goes last, the bus after all."""
    return (*(service.name for service in reversed(graph.services)), BUS_SERVICE)


def _settings(graph: ResolvedGraph, service: ResolvedService, state_root: Path, http: HttpAddress) -> dict[str, str]:
    settings = service.envs | {
        NAMESPACE_ENV: graph.namespace,
        STATE_DIR_VARIABLE: str(state_root),
        # Log files are read while the process runs.
        "PYTHONUNBUFFERED": "1",
    }
    if service.name == graph.root.name:
        settings |= {HTTP_HOST_ENV: http.host, HTTP_PORT_ENV: str(http.port)}
    return settings


def _command(graph: ResolvedGraph, service: ResolvedService) -> tuple[str, ...]:
    host = (sys.executable, "-m", "dynamo_local.runtime.host")
    return (*host, "--namespace", graph.namespace, "--service", service.name)


def _label(service: ResolvedService, index: int) -> str:
    return service.name if service.workers == 1 else f"worker {index + 1} of {service.workers} of {service.name}"


def _check_names(services: Sequence[ResolvedService]) -> None:
    seen: dict[str, str] = {}
    for service in services:
        # circus does not tell upper from lower case.
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
