"""Decides what `dynamo serve` starts: graph, configuration, devices, watchers. Starts and claims nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

import msgspec

from dynamo_local.bus.nats import BusAddress
from dynamo_local.core.errors import UsageError
from dynamo_local.quickstart import QUICKSTART
from dynamo_local.sdk.config.configuration import resolve
from dynamo_local.sdk.config.resolved import ResolvedGraph, ResolvedService
from dynamo_local.sdk.graph import Graph, load_graph
from dynamo_local.sdk.service import spec_of
from dynamo_local.supervisor.server.plan import (
    HttpAddress,
    ServiceTemplate,
    WatcherPlan,
    plan_forkserver,
    plan_services,
    service_templates,
)
from state.devices import Inventory
from state.inventory import probe
from state.paths import StatePaths

NATS_SERVER_ENV = "NATS_SERVER"
"""Address of the NATS server to use instead of starting one; --nats-url takes precedence."""

NATS_TOKEN_ENV = "NATS_TOKEN"
"""Token for the NATS server that NATS_SERVER or --nats-url names."""

_MODEL = "model"
_SERVED_NAME = "served-model-name"
_DTYPE = "dtype"


@dataclass(frozen=True)
class ServeRequest:
    """The command line of `dynamo serve`. `overrides` are options as typed, such as "--VllmWorker.seed=1"."""

    target: str
    config: Path | None = None
    overrides: tuple[str, ...] = ()
    namespace: str | None = None
    model: str | None = None
    nats_url: str | None = None
    cpu_slots: int | None = None
    forkserver: bool = True
    """Whether services may be forked from a fork server (process/forkserver)."""


@dataclass(frozen=True)
class Launch:
    """The decisions of `prepare`. `templates` are the services, `services` their first watchers. `bus`: the NATS server
    to use; None if the server is to start its own."""

    graph: ResolvedGraph
    inventory: Inventory
    paths: StatePaths
    bus: BusAddress | None
    http: HttpAddress
    templates: tuple[ServiceTemplate, ...]
    services: tuple[WatcherPlan, ...]
    forkserver: WatcherPlan | None = None


def prepare(
    request: ServeRequest,
    http: HttpAddress,
    environ: Mapping[str, str],
    quickstart_model: Callable[[], Path] | None = None,
) -> Launch:
    """Decide what is to be started. Raises UsageError for what cannot be done as asked.

    `quickstart_model` makes the quick start's model and returns its path; without it the model's name is left as it is.
    """
    graph = load_graph(request.target)
    resolved = resolve(graph, request.config, request.overrides, request.namespace, request.model)
    if not request.forkserver:
        resolved = without_preloads(resolved)
    paths = StatePaths.of(resolved.namespace, environ)
    inventory = probe(request.cpu_slots, environ)
    # Planned before the model is made, which takes time: this may fail.
    templates = service_templates(resolved, paths.root, http)
    services = plan_services(resolved.namespace, templates, inventory)
    if quickstart_model is not None and uses_quickstart(resolved):
        resolved = with_quickstart(graph, resolved, quickstart_model())
    forkserver = plan_forkserver(resolved, inventory, paths.root)
    bus = external_bus(request.nats_url, environ)
    return Launch(resolved, inventory, paths, bus, http, templates, services, forkserver)


def without_preloads(graph: ResolvedGraph) -> ResolvedGraph:
    """The graph with no service forked: every process imports by itself."""
    services = tuple(msgspec.structs.replace(service, preload=None) for service in graph.services)
    return msgspec.structs.replace(graph, services=services)


def uses_quickstart(graph: ResolvedGraph) -> bool:
    return any(service.config.get(_MODEL) == QUICKSTART for service in graph.services)


def with_quickstart(graph: Graph, resolved: ResolvedGraph, model: Path) -> ResolvedGraph:
    """The graph with the path of the quick start's model in place of its name. The model is still served under that
    name, and in float32, as it was made: a small model suffers most from less precision."""
    keys = {spec.name: frozenset(spec.schema.keys()) for spec in map(spec_of, graph.services)}

    def replaced(service: ResolvedService) -> ResolvedService:
        if service.config.get(_MODEL) != QUICKSTART:
            return service
        config = service.config | {_MODEL: str(model)}
        for key, value in ((_SERVED_NAME, [QUICKSTART]), (_DTYPE, "float32")):
            if key in keys[service.name]:
                config.setdefault(key, value)
        return msgspec.structs.replace(service, config=config)

    return msgspec.structs.replace(resolved, services=tuple(map(replaced, resolved.services)))


def external_bus(url: str | None, environ: Mapping[str, str]) -> BusAddress | None:
    """The address of the NATS server to use: `url`, else $NATS_SERVER; None if neither is given.

    The token is $NATS_TOKEN, or part of the URL (nats://TOKEN@host). A URL with user and password is kept as it is.
    Raises UsageError for what is no NATS URL.
    """
    given = url or environ.get(NATS_SERVER_ENV)
    if not given:
        return None
    full = given if "://" in given else f"nats://{given}"
    try:
        parts = urlsplit(full)
        port = parts.port or 4222
    except ValueError as error:
        raise UsageError(f"not an address of a NATS server: {error}", "expected nats://HOST:PORT") from error
    if parts.scheme not in ("nats", "tls") or not parts.hostname:
        raise UsageError("not an address of a NATS server", "expected nats://HOST:PORT")
    token = environ.get(NATS_TOKEN_ENV) or None
    if parts.username and parts.password is None:
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        return BusAddress(f"{parts.scheme}://{host}:{port}", unquote(parts.username))
    return BusAddress(full, token)


def shown_url(address: BusAddress) -> str:
    """The URL without user and password, for logs."""
    parts = urlsplit(address.url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
