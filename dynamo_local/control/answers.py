"""The contents of answers about what runs and what it does, as commands print them with --json. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from dynamo_local.core.messages.endpoints import BoardRevision, EndpointView
from dynamo_local.core.messages.events import Event
from dynamo_local.core.messages.presence import Counts, EngineInfo, Load
from dynamo_local.core.names import LOCAL_NODE
from dynamo_local.core.routing.explanation import ExplainedRoute
from dynamo_local.core.routing.kv_ways import KvWays


class WatcherRow(msgspec.Struct, frozen=True, kw_only=True):
    """A watcher as `dynamo ps` shows it.

    `state`: the change under way, if there is one ("reserved", "starting", "retiring", "restarting"). Otherwise the
    state that the process announces ("starting", "ready", "parked", "draining", "failed"). Otherwise "ended" (to be
    started again), "silent" (a process that announces nothing), "unknown" (the bus does not answer) or "stopped" (a
    service of the graph without a process).
    """

    watcher: str
    component: str
    role: str
    endpoint: str = ""
    """The endpoint that the process works for; empty for the graph's own processes."""
    revision: str = ""
    """The revision of that endpoint, such as "chat@2"."""
    pid: int | None
    devices: tuple[int, ...]
    share: float = 1.0
    """The part of its one device that the watcher has; 1 for devices that it holds whole."""
    state: str
    detail: str = ""
    lease: str | None = None
    url: str | None = None
    load: Load | None = None
    """The worker's load after its last engine step."""
    no_transfer: str | None = None
    """The reason why the worker's engine cannot transfer KV; None if it can."""
    kv: KvWays | None = None
    """How KV of other workers gets to this one; None for what is no worker, or announces nothing."""
    node: str = LOCAL_NODE
    """Where the process runs, and whose its pid and devices are; "local": the server's machine."""


class RequestLine(msgspec.Struct, frozen=True, kw_only=True):
    """A request under way. Workers are named by their watchers. `stays`: why the request cannot be migrated. The last
    fields are those of RequestRow (core/messages/admin.py)."""

    request: str
    worker: str | None
    endpoint: str = ""
    """The endpoint that the request is for; empty for the graph's own model."""
    revision: str = ""
    """The revision of that endpoint, such as "chat@2"."""
    epoch: int
    prompt_tokens: int | None
    """None: the request is held, and its prompt's length is not known yet."""
    tokens: int
    age_s: float
    moving_to: str | None
    stays: str | None
    frontend: str
    epoch_age_s: float | None = None
    epoch_start: int = 0
    migrations: int = 0
    prefill: str | None = None
    fidelity: str = "exact"
    fidelity_because_of: str | None = None
    held: str | None = None
    """Why the request is held until a worker is ready; then it has no id yet. None: it is not held."""


class RequestsView(msgspec.Struct, frozen=True, kw_only=True):
    """The oldest requests of each frontend, and the number of those that are left out."""

    requests: tuple[RequestLine, ...]
    left_out: int


class MigrationLine(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one request's migration. `outcome`: see core/migration/protocol.py. `warm_s`: from the start of the
    migration to the cut-over. `gap_s`: from the last token before the cut-over to the first one after it; `gap_steps`:
    the same in engine steps."""

    request: str
    outcome: str
    why: str
    worker: str | None
    """The destination; None if there was none."""
    warm_s: float | None
    gap_s: float | None
    gap_steps: float | None


class JobRow(msgspec.Struct, frozen=True, kw_only=True):
    """A job of a prefill queue. `state` is "waiting", or "in hand" for one that was delivered at least once. The
    optional fields are None for a message that is no job."""

    state: str
    age_s: float
    endpoint: str = ""
    """The endpoint whose prompts the queue is for; empty for the graph's own model."""
    revision: str = ""
    job: str | None = None
    request_id: str | None = None
    frontend: str | None = None
    tokens: int | None = None
    priority: int | None = None
    expires_in_s: float | None = None
    """Below 0: no decode worker waits for it any more."""


class QueueView(msgspec.Struct, frozen=True, kw_only=True):
    """The length of all queues that were asked for, and their oldest jobs."""

    namespace: str
    waiting: int
    in_hand: int
    jobs: tuple[JobRow, ...]


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


class SettingRow(msgspec.Struct, frozen=True):
    """A live setting. `source`: "set" (since the server started), "configuration" (of the graph) or "default"."""

    key: str
    value: int
    source: str
    help: str


class WatcherDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A watcher and its process. None: not known, or the process has no such part. Times are seconds."""

    watcher: str
    component: str
    role: str
    revision: str = ""
    """The endpoint's revision that it serves; empty for the graph's own processes."""
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
