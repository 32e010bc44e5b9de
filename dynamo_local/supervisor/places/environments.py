"""The environments in which the workers of a graph can live, by name. Each is imported only where it is used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from dynamo_local.core.errors import UsageError

if TYPE_CHECKING:
    from dynamo_local.supervisor.places.cluster import Cluster

LOCAL = "local"
"""This machine: no cluster."""

_CLUSTERS = {"ray": "dynamo_local.ray.cluster:RayCluster"}


def check_environment(name: str) -> str:
    """Return the name, or raise UsageError: that of an environment, or MODULE:CLASS of another cluster."""
    if name != LOCAL and name not in _CLUSTERS and ":" not in name:
        known = ", ".join((LOCAL, *_CLUSTERS))
        raise UsageError(f"there is no environment {name!r}", f"there are: {known}; or MODULE:CLASS of a cluster")
    return name


async def connect(environment: str, namespace: str, address: str | None) -> Cluster:
    """Connect to the cluster of an environment, for the graph of a namespace. `address`: as the cluster takes it.

    Raises UsageError if it is not installed, SupervisorError if it cannot be reached.
    """
    module, _, name = _CLUSTERS.get(environment, environment).partition(":")
    try:
        kind = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        extra = f"install dynamo-local[{environment}]" if environment in _CLUSTERS else "check the name"
        raise UsageError(f"environment {environment} cannot be used: {error}", extra) from error
    cluster: Cluster = await kind.connect(namespace, address)
    return cluster
