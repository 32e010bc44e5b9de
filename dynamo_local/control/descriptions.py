"""The contents of longer answers, with what processes say of themselves. Apart from answers.py, which `dynamo ps` is to
import in little time. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from dynamo_local.control.answers import WatcherRow
from dynamo_local.core.messages.admin import RequestLine
from dynamo_local.core.messages.endpoints import BoardRevision, EndpointView
from dynamo_local.core.messages.presence import Counts, EngineInfo, Load, Presence
from dynamo_local.core.messages.reports import Event, PlannerReport
from dynamo_local.core.messages.work import QueueLength
from dynamo_local.core.routing.explanation import ExplainedRoute


class RouteLine(ExplainedRoute, frozen=True, kw_only=True):
    """An assignment of a request. `request`: the id that its client knows."""

    request: str
    endpoint: str
    revision: str
    age_s: float


class RoutesView(msgspec.Struct, frozen=True, kw_only=True):
    """The latest assignments, the latest first, and the policy that has chosen."""

    policy: str
    routes: tuple[RouteLine, ...]


class FleetLook(msgspec.Struct, frozen=True):
    """What all processes announce, as messages have it. `connected`: whether NATS answers. If not, this is what was
    heard last, and no queue can be read. `queues`: lengths of the prefill queues by revision."""

    connected: bool
    members: tuple[Presence, ...]
    ready: tuple[str, ...]
    """Leases of the processes that may be given work, in any role."""
    queues: dict[str, QueueLength]
    planner: PlannerReport | None


class WatcherDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A watcher and its process. None: not known, or the process has no such part. Times are seconds."""

    watcher: str
    component: str
    role: str
    revision: str = ""
    """The endpoint's revision that it serves; empty for a process that serves no model of its own."""
    state: str
    detail: str
    pid: int | None
    children: tuple[str, ...]
    """Processes below it: pid and name."""
    devices: tuple[int, ...]
    age_s: float | None
    """Since the process started."""
    starts: int
    """Processes of the watcher since the server started."""
    deaths: tuple[Event, ...]
    """The last of its processes that ended without being told to, since the server started."""
    url: str | None
    engine: EngineInfo | None
    load: Load | None
    counts: Counts | None
    requests: int | None
    """Requests that the worker has."""
    leaving: int | None
    """Number of the worker's requests that are migrating to another worker."""
    arriving: int | None
    """Requests of other workers that are migrating to this one."""
    config: dict[str, Any]
    """The configuration of the service, with secrets masked."""
    log: str
    errors: tuple[str, ...]
    """The last error lines of the log."""


class EndpointDescription(msgspec.Struct, frozen=True, kw_only=True):
    """An endpoint: what was ordered, its state, its revisions and their workers. None: not known."""

    endpoint: EndpointView
    revisions: tuple[BoardRevision, ...]
    workers: tuple[WatcherRow, ...]
    requests: int | None
    """Requests for it that are under way."""
    events: tuple[Event, ...]
    """The last events of the endpoint since the server started."""


class Description(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a name stands for: one of these."""

    watcher: WatcherDescription | None = None
    endpoint: EndpointDescription | None = None
    request: RequestLine | None = None

    @property
    def found(self) -> WatcherDescription | EndpointDescription | RequestLine:
        """That one."""
        found = self.watcher or self.endpoint or self.request
        assert found is not None, "a server describes what there is"
        return found
