"""Reads what a service process needs to start: its watcher, its claim, its graph, and the address of the bus."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dynamo_local.bus.address import BusAddress
from dynamo_local.core.errors import ConfigError, GraphError, NotRunningError
from dynamo_local.core.names import WATCHER_ENV, Watcher, parse_watcher
from dynamo_local.sdk.config.resolved import ResolvedGraph, ResolvedService
from state.paths import StatePaths
from state.statefile.store import StateStore
from state.statefile.transitions import claimed


@dataclass(frozen=True)
class Startup:
    """The identity of a service process, and where it finds the bus and its server's files.

    `role`: that of the process before it, if there was one. `server_pid`, `circus_endpoint`: of its server.
    """

    watcher: Watcher
    graph: ResolvedGraph
    service: ResolvedService
    bus: BusAddress
    paths: StatePaths
    role: str
    server_pid: int
    circus_endpoint: str


def read_startup(namespace: str, service: str, environ: Mapping[str, str]) -> Startup:
    """Read what the server wrote for this process. Raises ConfigError, GraphError, NotRunningError, BusError, or
    StateError if the process has no claim."""
    watcher = parse_watcher(environ.get(WATCHER_ENV, ""))
    if (watcher.namespace, watcher.service) != (namespace, service):
        raise ConfigError(f"{WATCHER_ENV} is {watcher}, which is no watcher of {service} in {namespace}")
    paths = StatePaths.of(namespace, environ)
    graph = _read_graph(paths.graph_of(watcher.revision))
    if graph.namespace != namespace:
        raise GraphError(f"{paths.graph_of(watcher.revision)} is of namespace {graph.namespace}, not {namespace}")
    address = BusAddress.load(paths.bus_file)
    # Only read: the server alone writes it, by what this process announces.
    state = StateStore(paths).read()
    role = claimed(state, watcher).role
    return Startup(watcher, graph, graph.service(service), address, paths, role, state.owner.pid, state.circus_endpoint)


def _read_graph(path: Path) -> ResolvedGraph:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise NotRunningError(
            f"no graph in {path}: {error.strerror}", "services are started by `dynamo serve`"
        ) from error
    return ResolvedGraph.from_json(data)
