"""The contents of answers about what runs and what it does, as commands print them with --json. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from dynamo_local.core.messages.admin import RequestLine
from dynamo_local.core.messages.kv import KvWays
from dynamo_local.core.messages.presence import Load
from dynamo_local.core.names import LOCAL_NODE, MAIN


def same_fields(source: msgspec.Struct, kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the fields of `source` that `kind` has as well."""
    return {name: getattr(source, name) for name in kind.__struct_fields__ if hasattr(source, name)}


Level = Literal["ok", "warn", "fail"]
"""`warn`: works, with less speed, safety or room. `fail`: a server cannot start or cannot work."""


class Finding(msgspec.Struct, frozen=True):
    """The result of one check. `remedy` is empty if there is nothing to do."""

    check: str
    level: Level
    found: str
    remedy: str = ""


def ok(check: str, found: str) -> Finding:
    return Finding(check, "ok", found)


def warn(check: str, found: str, remedy: str) -> Finding:
    return Finding(check, "warn", found, remedy)


def fail(check: str, found: str, remedy: str) -> Finding:
    return Finding(check, "fail", found, remedy)


def any_failed(findings: Iterable[Finding]) -> bool:
    return any(finding.level == "fail" for finding in findings)


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
    """The endpoint whose model it serves; "main" for workers of the graph itself, empty for what is no worker."""
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

    @property
    def is_of_graph(self) -> bool:
        """Whether the graph has the process itself, and not an endpoint that was ordered beside it."""
        return self.endpoint in {"", MAIN}


class RequestsView(msgspec.Struct, frozen=True, kw_only=True):
    """The oldest requests of each frontend, and the number of those that are left out."""

    requests: tuple[RequestLine, ...]
    left_out: int


class JobRow(msgspec.Struct, frozen=True, kw_only=True):
    """A job of a prefill queue. `state` is "waiting", or "in hand" for one that was delivered at least once. The
    optional fields are None for a message that is no job."""

    state: str
    age_s: float
    endpoint: str = ""
    """The endpoint whose prompts the queue is for; "main" for the graph's own model."""
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


class SettingRow(msgspec.Struct, frozen=True):
    """A live setting. `source`: "set" (since the server started), "configuration" (of the graph) or "default"."""

    key: str
    value: int
    source: str
    help: str
