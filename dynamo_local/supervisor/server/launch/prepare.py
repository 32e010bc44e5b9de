"""Decides what `dynamo serve` starts: graph, configuration, devices, watchers. Starts and claims nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import msgspec

from dynamo_local.core.endpoints.checks import check_devices
from dynamo_local.core.endpoints.registry import Registry, ordered
from dynamo_local.core.endpoints.spec import EndpointSpec, check_names
from dynamo_local.core.errors import UsageError
from dynamo_local.core.fleet.view import ENGINE_ROLES
from dynamo_local.core.shares import summed
from dynamo_local.model.named.names import NAMES, NamedModel
from dynamo_local.sdk.config.configuration import resolve
from dynamo_local.sdk.config.resolved import ResolvedGraph, ResolvedService
from dynamo_local.sdk.config.sections import Flag, Section
from dynamo_local.sdk.graph import Graph, load_graph
from dynamo_local.sdk.service import spec_of
from dynamo_local.supervisor.places.cluster import check_environment
from dynamo_local.supervisor.server.launch.addresses import bus_of, check_kv_networks
from dynamo_local.supervisor.server.launch.launch import LOCAL, Launch, here
from dynamo_local.supervisor.server.launch.models import Obtain, with_models, with_rooms, without_downloads_for_mockers
from dynamo_local.supervisor.server.launch.plan import HttpAddress, plan_forkserver, plan_services, service_templates
from dynamo_local.supervisor.server.launch.templates import ServiceTemplate
from state.devices.allocation import Inventory, cpu_slots, noun
from state.devices.inventory import probe
from state.endpoints.registry import read_registry
from state.paths import StatePaths

_MODEL = "model"
_SERVED_NAME = "served-model-name"
_DTYPE = "dtype"


NamedModels = Callable[[str], NamedModel]
"""Gives the model of one of `model.names.NAMES`, and makes or fetches it if need be."""


@dataclass(frozen=True)
class ServeRequest:
    """The command line of `dynamo serve`. `overrides` are options as typed, such as "--VllmWorker.seed=1"."""

    target: str
    config: Path | None = None
    overrides: tuple[str, ...] = ()
    namespace: str | None = None
    model: str | None = None
    nats_url: str | None = None
    nats_ca: Path | None = None
    bus_host: str | None = None
    cpu_slots: int | None = None
    forkserver: bool = True
    """Whether services may be forked from a fork server (process/forkserver)."""
    flags: tuple[Flag, ...] = ()
    """Options that name no service, such as "--max-model-len"."""
    endpoints: tuple[EndpointSpec, ...] = ()
    """Endpoints to create, or to update if they exist."""
    forget: bool = False
    """Whether the endpoints that were ordered earlier are dropped."""
    environment: str = LOCAL
    """Where workers live (supervisor/places/cluster.py)."""
    cluster_address: str | None = None
    """Address of the cluster, as it takes it."""


@dataclass(frozen=True)
class Chosen:
    """What was chosen where the user gives nothing: by service, and the number of CPU slots (None: as it is).

    `engine_bytes`: what each engine takes of the machine's memory at most, and `kv_bytes` what its KV cache does; None
    on GPUs, and where it is not known.
    """

    sections: Mapping[str, Section] = field(default_factory=lambda: MappingProxyType({}))
    slots: int | None = None
    engine_bytes: int | None = None
    kv_bytes: int | None = None


Chooser = Callable[[Graph, ResolvedGraph, Inventory], Chosen]
"""Chooses for the graph as the user configures it, and for these devices. Raises UsageError."""


def prepare(
    request: ServeRequest,
    http: HttpAddress,
    environ: Mapping[str, str],
    named_models: NamedModels | None = None,
    obtain: Obtain | None = None,
    choose: Chooser | None = None,
) -> Launch:
    """Decide what is to be started. Raises UsageError for what cannot be done as asked.

    `named_models` is asked for models that are given by name, such as `random`, and `obtain` checks and fetches the
    other models of workers; without them models are left as they are. `choose` chooses for the model what the user
    gives neither on the command line nor in the file.
    """
    bus, host = bus_of(request.nats_url, request.nats_ca, request.bus_host, environ)
    graph = load_graph(request.target)
    resolved = _resolve(graph, request)
    paths = StatePaths.of(resolved.namespace, environ)
    registry = registry_of(paths, request.endpoints, forget=request.forget)
    inventory = probe(request.cpu_slots, environ)
    # Planned before a model is made or fetched, which takes time: this may fail.
    templates = service_templates(resolved, paths.root, http)
    clustered = request.environment != LOCAL
    services = plan_services(resolved.namespace, here(templates, clustered=clustered), inventory)
    if choose is not None:
        chosen = choose(graph, resolved, inventory)
        resolved = _resolve(graph, request, chosen.sections)
        inventory = divided(inventory, chosen.slots)
        templates = service_templates(resolved, paths.root, http)
        services = plan_services(resolved.namespace, here(templates, clustered=clustered), inventory)
    if clustered:
        for entry in registry.entries.values():
            check_clustered(entry.spec)
        check_endpoint_names(request.endpoints, registry, resolved)
    else:
        check_endpoints(request.endpoints, registry, resolved, inventory, templates)
    endpoints = with_rooms(request.endpoints, registry, inventory)
    if named_models is not None:
        resolved = with_named_models(graph, resolved, named_models)
    if obtain is not None:
        resolved = with_models(graph, resolved, obtain, on_cpu=inventory.kind == "cpu-slot")
    check_kv_networks(resolved, here=not clustered)
    own = {template.service for template in here(templates, clustered=clustered)}
    forkserver = plan_forkserver(resolved, inventory, paths.root, own)
    return Launch(
        *(resolved, without_devices(inventory) if clustered else inventory, paths, bus, http),
        *(templates, services, forkserver, endpoints, request.forget),
        bus_host=host,
        environment=check_environment(request.environment),
        cluster_address=request.cluster_address,
        devices=inventory,
    )


def registry_of(paths: StatePaths, endpoints: tuple[EndpointSpec, ...], *, forget: bool) -> Registry:
    """The endpoints that a server of the namespace would serve: those of the registry, and these. Writes nothing.

    Raises StateError if the registry cannot be read, UsageError if the two contradict each other.
    """
    return ordered(Registry() if forget else read_registry(paths), endpoints, 0.0)


def check_endpoints(
    endpoints: Sequence[EndpointSpec],
    registry: Registry,
    graph: ResolvedGraph,
    inventory: Inventory,
    templates: Sequence[ServiceTemplate],
) -> None:
    """Raise UsageError if an endpoint that is to be created or updated has a name of others, needs devices that there
    are not, beside the others that are and the workers of the graph.

    Endpoints that were ordered earlier are not refused: the machine may have changed, and they wait for devices then.
    """
    check_endpoint_names(endpoints, registry, graph)
    total = len(inventory.devices) - own_devices(templates)
    for spec in endpoints:
        others = (other for other in endpoints if other.name != spec.name)
        check_devices(spec, others, total, noun(inventory.kind, 2))


def check_endpoint_names(endpoints: Iterable[EndpointSpec], registry: Registry, graph: ResolvedGraph) -> None:
    """Raise UsageError if an endpoint that is to be created or updated has a name of others."""
    specs = [entry.spec for entry in registry.entries.values()]
    for spec in endpoints:
        check_names(spec, [other for other in specs if other.name != spec.name], own_names(graph))


def check_clustered(spec: EndpointSpec) -> None:
    """Raise UsageError for an endpoint that cannot be served where workers live on the nodes of a cluster."""
    if spec.adapter_of is not None:
        raise UsageError(
            f"adapter {spec.name} cannot be served on a cluster: its nodes are not told of adapters",
            "serve it with --environment local, or merge it into a model of its own; --forget drops what was ordered",
        )


def own_devices(templates: Iterable[ServiceTemplate]) -> float:
    """Devices, or shares of them, that the graph's own workers have at the start."""
    return summed(one.device_count * one.workers for one in templates if one.role in ENGINE_ROLES)


def own_names(graph: ResolvedGraph) -> frozenset[str]:
    """Names under which the graph's own workers serve a model; none in a graph without workers."""
    if not any(service.role in ENGINE_ROLES for service in graph.services):
        return frozenset()
    config = graph.root.config
    return frozenset(map(str, config.get(_SERVED_NAME) or filter(None, [config.get(_MODEL)])))


def without_devices(inventory: Inventory) -> Inventory:
    """The inventory of a machine on which no worker is to live."""
    return msgspec.structs.replace(inventory, devices=())


def _resolve(graph: Graph, request: ServeRequest, chosen: Mapping[str, Section] | None = None) -> ResolvedGraph:
    resolved = resolve(
        graph,
        request.config,
        request.overrides,
        request.namespace,
        request.model,
        flags=request.flags,
        chosen=chosen or {},
    )
    resolved = without_downloads_for_mockers(graph, resolved)
    return resolved if request.forkserver else without_preloads(resolved)


def divided(inventory: Inventory, slots: int | None) -> Inventory:
    """The inventory with its cores divided into so many CPU slots, which are held as before; None: as it is."""
    if slots is None or inventory.kind == "gpu":
        return inventory
    cores = [core for device in inventory.devices for core in device.cores]
    return cpu_slots(cores, slots, exclusive=inventory.exclusive)


def without_preloads(graph: ResolvedGraph) -> ResolvedGraph:
    """The graph with no service forked: every process imports by itself."""
    services = tuple(msgspec.structs.replace(service, preload=None) for service in graph.services)
    return msgspec.structs.replace(graph, services=services)


def with_named_models(graph: Graph, resolved: ResolvedGraph, named_models: NamedModels) -> ResolvedGraph:
    """The graph with the paths of models in place of their names. Each is served under its name, and loaded in the
    dtype that it needs, unless the configuration says otherwise."""
    wanted = {service.config.get(_MODEL) for service in resolved.services}
    found = {name: named_models(name) for name in NAMES if name in wanted}
    keys = {spec.name: frozenset(spec.schema.keys()) for spec in map(spec_of, graph.services)}

    def replaced(service: ResolvedService) -> ResolvedService:
        model = found.get(str(service.config.get(_MODEL)))
        if model is None:
            return service
        config = service.config | {_MODEL: str(model.folder)}
        for key, value in ((_SERVED_NAME, [model.served_name]), (_DTYPE, model.dtype)):
            if key in keys[service.name] and value is not None:
                config.setdefault(key, value)
        return msgspec.structs.replace(service, config=config)

    return msgspec.structs.replace(resolved, services=tuple(map(replaced, resolved.services)))
