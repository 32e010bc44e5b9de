"""Declares services, joins them to a graph, and resolves its configuration.

A service is a class:

    @service(resources={"gpu": 1}, workers=2)
    class Worker:
        @endpoint()
        async def generate(self, text: str) -> AsyncIterator[str]: ...

    @service()
    class Frontend:
        worker = depends(Worker)

This package turns such classes, a YAML file and command-line options into a `ResolvedGraph`, and defines the interface
of service clients. It starts no process and opens no connection: see supervisor, process and bus/rpc for these.
"""

from __future__ import annotations

from dynamo_local.sdk.client import Call, ServiceClient
from dynamo_local.sdk.config.schema import ConfigSchema, KeySpec, SchemaTable, combine, schema_of
from dynamo_local.sdk.graph import Graph, load_graph
from dynamo_local.sdk.service import (
    DeviceUse,
    Resources,
    Service,
    ServiceSpec,
    async_on_shutdown,
    async_on_start,
    bind_clients,
    depends,
    endpoint,
    service,
    spec_of,
)

__all__ = [
    "Call",
    "ConfigSchema",
    "DeviceUse",
    "Graph",
    "KeySpec",
    "Resources",
    "SchemaTable",
    "Service",
    "ServiceClient",
    "ServiceSpec",
    "async_on_shutdown",
    "async_on_start",
    "bind_clients",
    "combine",
    "depends",
    "endpoint",
    "load_graph",
    "schema_of",
    "service",
    "spec_of",
]
