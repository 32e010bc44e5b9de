"""Decides what is launched: graph, settings, devices, watchers. Starts and claims nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from dynamo_local.core.endpoints.checks import check_devices
from dynamo_local.core.endpoints.registry import Registry, ordered
from dynamo_local.core.endpoints.spec import EndpointSpec, check_names
from dynamo_local.core.errors import UsageError
from dynamo_local.core.fleet.view import ENGINE_ROLES
from dynamo_local.core.names import MAIN
from dynamo_local.core.shares import summed
from dynamo_local.sdk.config.resolved import ResolvedGraph
from dynamo_local.supervisor.places.cluster import check_environment
from dynamo_local.supervisor.server.launch.addresses import bus_of, check_kv_networks
from dynamo_local.supervisor.server.launch.choosing import Chooser, Chosen
from dynamo_local.supervisor.server.launch.models import (
    ModelSource,
    with_models,
    with_rooms,
)
from dynamo_local.supervisor.server.launch.plan import (
    HttpAddress,
    Launch,
    here,
    main_on_board,
    plan_forkserver,
    plan_services,
    service_templates,
)
from dynamo_local.supervisor.server.launch.request import GraphRequest, ServeRequest
from dynamo_local.supervisor.server.launch.templates import ServiceTemplate
from state.devices.allocation import Inventory, cpu_slots, noun
from state.devices.inventory import probe
from state.endpoints.registry import read_registry
from state.paths import StatePaths


@dataclass(frozen=True)
class Settled:
    """A graph with all that was given and chosen, its models in place, and the devices, divided as was chosen."""

    graph: ResolvedGraph
    inventory: Inventory
    chosen: Chosen


def settle(
    request: GraphRequest,
    resolved: ResolvedGraph,
    inventory: Inventory,
    chooser: Chooser,
    models: ModelSource | None,
    *,
    is_here: bool,
) -> Settled:
    """Choose for the graph what is not given, and get its models, which may take long.

    `resolved`: the graph with what is given. `models` None: nothing is chosen, and models stay as they are. `is_here`:
    whether the workers live on this machine. Raises UsageError for what cannot be done as asked, and another
    DynamoError where trying again may help.
    """
    chosen = Chosen()
    if models is not None:
        chosen = chooser.choose(request.graph, resolved, inventory, models)
        inventory = divided(inventory, chosen.slots)
        resolved = request.resolve(chosen.sections)
        resolved = with_models(request.graph, resolved, models, on_cpu=inventory.kind == "cpu-slot")
    check_kv_networks(resolved, here=is_here)
    return Settled(resolved, inventory, chosen)


def prepare(
    request: ServeRequest, http: HttpAddress, environ: Mapping[str, str], models: ModelSource | None = None
) -> Launch:
    """Decide what a server is to start. `models`: see `settle`. Raises UsageError for what cannot be done as asked."""
    request.check(environ)
    bus, host = bus_of(request.nats_url, request.nats_ca, request.bus_host, environ)
    asked, clustered = request.for_graph(), request.clustered
    resolved = asked.resolve()
    paths = StatePaths.of(resolved.namespace, environ)
    registry = registry_of(paths, request.endpoints, forget=request.forget)
    inventory = probe(request.cpu_slots, environ)
    # Planned before a model is made or fetched, which takes time: this may fail.
    templates = service_templates(resolved, paths.root, http)
    plan_services(resolved.namespace, here(templates, clustered=clustered), inventory)
    chooser = _chooser(request, registry, environ)
    settled = settle(asked, resolved, inventory, chooser, models, is_here=not clustered)
    resolved, inventory = settled.graph, settled.inventory
    templates = service_templates(resolved, paths.root, http)
    own = here(templates, clustered=clustered)
    services = plan_services(resolved.namespace, own, inventory)
    check_endpoints(request, registry, resolved, inventory, templates)
    endpoints = with_rooms(request.endpoints, registry, inventory)
    forkserver = plan_forkserver(resolved, inventory, paths.root, {template.service for template in own})
    return Launch(
        *(resolved, without_devices(inventory) if clustered else inventory, paths, bus, http),
        *(templates, services, forkserver, endpoints, request.forget),
        bus_host=host,
        environment=check_environment(request.environment),
        cluster_address=request.cluster_address,
        devices=inventory,
        chosen=settled.chosen.choices,
    )


def _chooser(request: ServeRequest, registry: Registry, environ: Mapping[str, str]) -> Chooser:
    sized = request.graph is None
    # The settings of other graphs do not depend on endpoints.
    beside = registry.entries.values() if sized or request.of_endpoints else ()
    return Chooser(
        sized=sized,
        scaling=request.planner,
        parsers=request.auto_parsers,
        cpu_slots=request.cpu_slots,
        endpoints=tuple(entry.spec for entry in beside),
        clustered=request.clustered,
        environ=environ,
    )


def registry_of(paths: StatePaths, endpoints: tuple[EndpointSpec, ...], *, forget: bool) -> Registry:
    """The endpoints that a server of the namespace would serve: those of the registry, and these. Writes nothing.

    Raises StateError if the registry cannot be read, UsageError if the two contradict each other.
    """
    return ordered(Registry() if forget else read_registry(paths), endpoints, 0.0)


def check_endpoints(
    request: ServeRequest,
    registry: Registry,
    graph: ResolvedGraph,
    inventory: Inventory,
    templates: Sequence[ServiceTemplate],
) -> None:
    """Raise UsageError if an endpoint that is to be created or updated has a name of others, or needs devices that
    there are not, beside the others of these and the workers of the graph; and for any that no cluster can serve.

    Endpoints that were ordered earlier are not refused for devices: the machine may have changed, and they wait then.
    """
    specs, total = [entry.spec for entry in registry.entries.values()], len(inventory.devices) - own_devices(templates)
    for spec in specs if request.clustered else ():
        check_clustered(spec)
    for spec in request.endpoints:
        check_names(spec, [other for other in specs if other.name != spec.name], own_names(graph))
    if MAIN in registry.entries:
        raise UsageError(
            "endpoint main was ordered earlier, and that is the name of a graph's own model by now",
            "delete it with the version before, or drop all endpoints by --forget",
        )
    for spec in () if request.clustered else request.endpoints:
        others = (other for other in request.endpoints if other.name != spec.name)
        check_devices(spec, others, total, noun(inventory.kind, 2))


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
    return frozenset(name for each in main_on_board(graph) for name in each.served_names)


def without_devices(inventory: Inventory) -> Inventory:
    """The inventory of a machine on which no worker is to live."""
    return msgspec.structs.replace(inventory, devices=())


def divided(inventory: Inventory, slots: int | None) -> Inventory:
    """The inventory with its cores divided into so many CPU slots, which are held as before; None: as it is."""
    if slots is None or inventory.kind == "gpu":
        return inventory
    cores = [core for device in inventory.devices for core in device.cores]
    return cpu_slots(cores, slots, exclusive=inventory.exclusive)
