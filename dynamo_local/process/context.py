"""The context that a service gets in its constructor: its place in the graph, its configuration, the bus, its tasks."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from dynamo_local.bus.nats import Bus
from dynamo_local.bus.presence import Announcer
from dynamo_local.core.names import Watcher
from dynamo_local.core.subjects import Subjects
from dynamo_local.sdk.config.resolved import ResolvedGraph, ResolvedService
from dynamo_local.sdk.config.schema import build_settings
from dynamo_local.tasks import TaskGuard

_T = TypeVar("_T")


@dataclass
class ServiceContext:
    """Passed to a service's constructor. There is one for each process."""

    watcher: Watcher
    revision: str
    """Text of the endpoint's revision that the process serves; empty for one that serves no model of its own."""
    lease: str
    graph: ResolvedGraph
    service: ResolvedService
    bus: Bus
    announcer: Announcer
    private_dir: Path
    """Directory of this process alone, mode 0700, for sockets and temporary files. Removed after the process ends."""
    tasks: TaskGuard = field(default_factory=TaskGuard)

    @property
    def namespace(self) -> str:
        return self.watcher.namespace

    @property
    def subjects(self) -> Subjects:
        return Subjects(self.namespace, self.revision)

    @property
    def config(self) -> dict[str, Any]:
        """The service's resolved configuration, keys in kebab-case."""
        return self.service.config

    def settings(self, kind: type[_T]) -> _T:
        """The configuration as an instance of the service's settings dataclass. Raises ConfigError."""
        return build_settings(kind, self.service.name, self.config)

    def has(self, service: str) -> bool:
        """Whether the graph being served contains this service."""
        return any(other.name == service for other in self.graph.services)
