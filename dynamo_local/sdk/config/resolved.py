"""A resolved graph: for each service its number of workers, devices, environment and configuration.

`resolve()` makes a resolved graph. The supervisor plans watchers from it, and every service process reads its part of
it from `graph.json`. The configuration may hold secrets: show a graph only through `redacted()`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from dynamo_local.core.errors import DecodeError, GraphError
from dynamo_local.sdk.config.redaction import redact

SCHEMA_VERSION = 1


class ResolvedService(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A service of a resolved graph.

    `target`: "module:Class" of the service class. `gpu`: number of devices of each worker, or its share of one. `cpu`:
    number of cores of each worker, 0 if not given. `virtual`: the workers compute nothing on their devices. `config`:
    the given keys in kebab-case, without defaults. `depends_on`: the services whose clients a process gets. `preload`:
    the module that the fork server imports.
    """

    name: str
    target: str
    role: str
    workers: int
    gpu: float
    cpu: float
    envs: dict[str, str]
    config: dict[str, Any]
    depends_on: tuple[str, ...]
    preload: str | None = None
    virtual: bool = False


class ResolvedGraph(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A graph as it is started. `services` are ordered by dependency: the root is the last. `notes` tell the user which
    keys were replaced or ignored."""

    target: str
    namespace: str
    services: tuple[ResolvedService, ...]
    schema_version: int = SCHEMA_VERSION
    notes: tuple[str, ...] = ()

    @property
    def root(self) -> ResolvedService:
        """The service that the target names, to which clients connect."""
        return self.services[-1]

    def service(self, name: str) -> ResolvedService:
        """Return the service of that name. Raises GraphError if the graph has none."""
        for candidate in self.services:
            if candidate.name == name:
                return candidate
        raise GraphError(f"the graph has no service {name!r}", f"it has {', '.join(s.name for s in self.services)}")

    def redacted(self) -> ResolvedGraph:
        """Return the graph with secrets masked."""
        return msgspec.structs.replace(self, services=tuple(_redacted(service) for service in self.services))

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=2)

    @classmethod
    def from_json(cls, data: bytes) -> ResolvedGraph:
        """Read the output of `to_json`. Raises DecodeError for anything else."""
        try:
            graph = msgspec.json.decode(data, type=cls)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise DecodeError(f"not a resolved graph: {error}") from error
        if graph.schema_version != SCHEMA_VERSION or not graph.services:
            raise DecodeError(
                f"resolved graph, version {graph.schema_version}, {len(graph.services)} services",
                f"this release reads version {SCHEMA_VERSION} with at least one service",
            )
        return graph


def _redacted(service: ResolvedService) -> ResolvedService:
    envs = {name: redact(name, value) for name, value in service.envs.items()}
    return msgspec.structs.replace(service, envs=envs, config=redact("", service.config))
