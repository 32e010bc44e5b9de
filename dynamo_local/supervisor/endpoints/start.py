"""Starts the controller of endpoints in a server that has started: opens the registry, and runs what looks after it."""

from __future__ import annotations

import time

from dynamo_local.core.endpoints.registry import ordered
from dynamo_local.supervisor.endpoints.controller import EndpointController
from dynamo_local.supervisor.endpoints.kept_registry import KeptRegistry
from dynamo_local.supervisor.endpoints.revisions.launch import EndpointLauncher, MakeTools
from dynamo_local.supervisor.keys.start import take_key_orders
from dynamo_local.supervisor.places.capacity import (
    THIS_MACHINE,
    Capacity,
    ClusterCapacity,
    MachineCapacity,
    MachineFacts,
)
from dynamo_local.supervisor.server.controlled import ControlledServer, Controller
from dynamo_local.supervisor.server.launch.prepare import own_devices
from dynamo_local.tasks import TaskGuard
from state.endpoints.registry import RegistryStore

_END_S = 4.0
"""The time that tasks of endpoints have to end when the server does. What they leave undone goes with the server."""


def endpoint_controller(make_tools: MakeTools, *, forks: bool = True, facts: MachineFacts = THIS_MACHINE) -> Controller:
    """Return the controller of a server's endpoints. `forks`: whether workers may be forked from the fork server."""

    async def run(server: ControlledServer) -> None:
        kept = await _open(server)
        await take_key_orders(server)
        tasks = TaskGuard()
        try:
            launcher = _launcher(server, make_tools, facts, forks=forks)
            controller = EndpointController(server, kept, launcher, tasks, _capacity(server, facts), facts)
            tasks.spawn("endpoints", controller.run())
            await tasks.failed()
        finally:
            await tasks.close(_END_S)

    return run


async def _open(server: ControlledServer) -> KeptRegistry:
    """The registry, with the endpoints that the command line gives. Raises StateError, UsageError."""
    kept = await KeptRegistry.open(RegistryStore(server.lock), server.report)
    await kept.change(lambda before: ordered(before, server.launch.endpoints, time.time()))
    return kept


def _launcher(server: ControlledServer, make_tools: MakeTools, facts: MachineFacts, *, forks: bool) -> EndpointLauncher:
    launch = server.launch
    namespace, root = launch.graph.namespace, launch.paths.root
    is_here = not launch.clustered
    return EndpointLauncher(namespace, root, launch.probed, make_tools, server.report, forks, facts.memory, is_here)


def _capacity(server: ControlledServer, facts: MachineFacts) -> Capacity:
    launch = server.launch
    own = own_devices(launch.templates)
    if server.nodes is None:
        return MachineCapacity(launch.inventory, facts, own)
    return ClusterCapacity(server.blueprint.current().inventory.kind, server.nodes, own)
