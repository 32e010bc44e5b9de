"""A graph with every decision made: what is started, how often, with which devices and which configuration.

`resolve()` makes it; the supervisor plans watchers from it; every service process reads its own part of it
from `graph.json`. It holds what the user configured, secrets included: show it only through `redacted()`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from dynamo_local.core.errors import DecodeError, GraphError
from dynamo_local.sdk.config.redaction import redact

SCHEMA_VERSION = 1


class ResolvedService(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One service of a graph.

    `target` is "module:Class" of the service class. `gpu` counts devices for each worker; `cpu` is a number
    of cores, 0 when the service asks for none in particular. `virtual`: it computes nothing on
    its devices. `config` holds the keys that were set, spelled
    in kebab-case; defaults are not written out. `depends_on` names the services whose clients the process
    gets. `preload` is the module to import beforehand.
    """

    name: str
    target: str
    role: str
    workers: int
    gpu: int
    cpu: float
    envs: dict[str, str]
    config: dict[str, Any]
    depends_on: tuple[str, ...]
    preload: str | None = None
    virtual: bool = False


class ResolvedGraph(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A graph as it is started. `services` come dependency first, so the root is the last."""

    target: str
    namespace: str
    services: tuple[ResolvedService, ...]
    schema_version: int = SCHEMA_VERSION

    @property
    def root(self) -> ResolvedService:
        """The service that the target names, the one that users talk to."""
        return self.services[-1]

    def service(self, name: str) -> ResolvedService:
        """The service of that name. Raises GraphError if the graph has none."""
        for candidate in self.services:
            if candidate.name == name:
                return candidate
        raise GraphError(f"the graph has no service {name!r}", f"it has {', '.join(s.name for s in self.services)}")

    def redacted(self) -> ResolvedGraph:
        """The same graph with secrets masked, fit to be shown."""
        return msgspec.structs.replace(self, services=tuple(_redacted(service) for service in self.services))

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=2)

    @classmethod
    def from_json(cls, data: bytes) -> ResolvedGraph:
        """Inverse of `to_json`. Raises DecodeError for anything else."""
        try:
            graph = msgspec.json.decode(data, type=cls)
        except msgspec.DecodeError as error:
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
