"""Reads what a service process needs to start: its watcher, its graph, and the address of the bus."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dynamo_local.bus.nats import BusAddress
from dynamo_local.core.errors import ConfigError, GraphError, NotRunningError
from dynamo_local.core.names import WATCHER_ENV, Watcher, parse_watcher
from dynamo_local.sdk.config.resolved import ResolvedGraph, ResolvedService
from state.paths import StatePaths


@dataclass(frozen=True)
class Startup:
    """The identity of a service process, and where it finds the bus and its server's files."""

    watcher: Watcher
    graph: ResolvedGraph
    service: ResolvedService
    bus: BusAddress
    paths: StatePaths


def read_startup(namespace: str, service: str, environ: Mapping[str, str]) -> Startup:
    """Read what the server wrote for this process. Raises ConfigError, GraphError, NotRunningError or BusError."""
    watcher = parse_watcher(environ.get(WATCHER_ENV, ""))
    if (watcher.namespace, watcher.service) != (namespace, service):
        raise ConfigError(f"{WATCHER_ENV} is {watcher}, which is no watcher of {service} in {namespace}")
    paths = StatePaths.of(namespace, environ)
    graph = _read_graph(paths.graph_of(watcher.revision))
    if graph.namespace != namespace:
        raise GraphError(f"{paths.graph_of(watcher.revision)} is of namespace {graph.namespace}, not {namespace}")
    return Startup(watcher, graph, graph.service(service), BusAddress.load(paths.bus_file), paths)


def _read_graph(path: Path) -> ResolvedGraph:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise NotRunningError(
            f"no graph in {path}: {error.strerror}", "services are started by `dynamo serve`"
        ) from error
    return ResolvedGraph.from_json(data)
