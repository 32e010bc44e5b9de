"""The networks in which workers are to read KV between machines."""

from __future__ import annotations

from dynamo_local.core.errors import UsageError
from dynamo_local.sdk.config.resolved import ResolvedGraph
from state.machine.interfaces import interface_in, interfaces, network_of

_KEY = "kv-network"


def check_kv_networks(graph: ResolvedGraph, *, here: bool) -> None:
    """As `check_kv_network`, for the settings of all services."""
    for cidr in sorted({str(service.config[_KEY]) for service in graph.services if service.config.get(_KEY)}):
        check_kv_network(cidr, here=here)


def check_kv_network(cidr: str | None, *, here: bool) -> None:
    """Raise UsageError for what is no network, and, if the workers are `here`, for one that this machine is not in."""
    if not cidr:
        return
    try:
        network = network_of(cidr)
    except ValueError as error:
        raise UsageError(f"--{_KEY} {error}") from error
    if here and interface_in(network) is None:
        known = ", ".join(f"{address} ({name})" for name, address in interfaces().items())
        raise UsageError(
            f"--{_KEY}: no interface of this machine has its address in {network}", f"it has {known or 'none'}"
        )
