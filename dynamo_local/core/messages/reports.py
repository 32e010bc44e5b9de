"""What processes report: events, the planner's observations and decisions, and the metrics of frontends."""

from __future__ import annotations

from typing import Literal

import msgspec

from dynamo_local.core.codec import Message

# What happens to a server and its processes: one record for each event, for `dynamo events`. The server writes all
# events of its namespace to one file. Other processes publish theirs on the bus.


EVENT_KINDS = {
    "server": "the server starts, is ready, stops",
    "start": "a process has started, or is ready",
    "death": "a process ended that was not told to; circusd and NATS included",
    "scale": "workers are added, removed and restarted, by the planner or by hand",
    "planner": "an observing planner would change something",
    "role": "a worker has changed its role",
    "park": "a worker or an endpoint has parked, or a worker is awake again",
    "sleep": "an endpoint has no workers until it is asked for",
    "wake": "an endpoint that was parked or asleep is woken, and then has a worker that is ready",
    "swap": "an endpoint gives devices to another one that waits for them",
    "drain": "a process takes no more work",
    "migration": "the migration of a request has ended",
    "device": "devices are claimed and freed",
    "setting": "a live setting was changed",
    "secret": "a token or a file of keys was replaced, or cannot be",
    "key": "an API key is created, rotated or revoked",
    "endpoint": "an endpoint is created, changes its state, or is deleted",
}
"""Kinds of events that the server writes down, each with its meaning."""

REQUEST, STATE = "request", "state"
PASSING_KINDS = {
    REQUEST: "a request has a worker, its first token, or has ended; told to who asks for this kind, not written down",
    STATE: "an endpoint is in another state, or has other workers; told to who asks for this kind, not written down",
}
"""Kinds of events that are told to who asks for them, and not written down, each with its meaning."""

TOLD_KINDS = EVENT_KINDS | PASSING_KINDS
"""Kinds of events that the control API tells."""


class Event(Message, frozen=True, omit_defaults=True):
    """An event of a server. `time` is Unix time, in seconds; 0: the server fills in when the event arrives.

    `what` says what happened, and `why` for what reason, in words; the other fields repeat the facts of both for
    programs.
    """

    kind: str
    """The kind, of `TOLD_KINDS`; events of later versions may have others."""
    what: str
    why: str = ""
    watcher: str = ""
    """The watcher concerned; empty for an event of the whole server or of an endpoint."""
    time: float = 0.0
    pid: int | None = None
    exit_code: int | None = None
    """Exit code of a process that has ended; negative for a signal."""
    devices: tuple[int, ...] = ()
    """Devices that were claimed or freed."""
    request: str | None = None
    """Id of the request concerned, as its client knows it."""
    outcome: str | None = None
    """Outcome of the migration (core/migration/protocol.py)."""
    source: str | None = None
    """Watcher that the request was on."""
    destination: str | None = None
    """Watcher that the request was to migrate to."""
    endpoint: str = ""
    """The endpoint concerned, if no watcher is."""
    cause: str = ""
    """Why an endpoint was parked, fell asleep or was woken, in a word (core/endpoints/idling.py)."""
    to: str = ""
    """Endpoint that the devices are given to."""
    took_s: float | None = None
    """Of an endpoint: from its being woken, or from the decision to give its devices away, to the worker that is ready,
    in seconds. Of a request: the time since it came."""
    key: str = ""
    """Name of the API key by which somebody has ordered what happened; empty: the owner of the server, or nobody."""
    gap_s: float | None = None
    """From the last token before the migration's cut to the first token after it, in seconds."""
    tokens: int | None = None
    """Number of tokens that the request has output."""


class RequestNews(Message, frozen=True, omit_defaults=True):
    """What has happened to requests of a frontend lately. `left_out`: new requests of which nothing is told, because
    they were too many."""

    events: tuple[Event, ...]
    left_out: int = 0


# The planner's report to all listeners.


class RoleReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """The workers of a role as the planner observes them. `usage`: mean KV usage of those with a known load, 0 to 1."""

    role: str
    routable: int
    starting: int = 0
    retiring: int = 0
    parked: int = 0
    running: int | None = None
    waiting: int | None = None
    usage: float | None = None


class EndpointReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """An endpoint's workers of one role as the planner observes them. None: the value could not be read.

    `ordered`: their number as the server was told. `ready`: those that take requests. `in_flight`: requests that are
    not finished; jobs for prefill workers. `wanted`: what the endpoint's policy asks for, and `share`: what it gets of
    the budget; None if the number is fixed or the server is changing it. `parked`: workers that are parked; `state`:
    that of the endpoint.
    """

    endpoint: str
    role: str
    ordered: int
    ready: int | None = None
    in_flight: int | None = None
    wanted: int | None = None
    share: int | None = None
    parked: int = 0
    state: str = ""


class DecisionReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """A decision, and the outcomes of its actions. `time` and `since` are Unix time, in seconds.

    Decisions in a row without an outcome that differ in their figures alone are one report: the last of them, made at
    `time`, with their number and the time of the first.
    """

    time: float
    text: str
    outcomes: tuple[str, ...] = ()
    times: int = 1
    since: float | None = None
    """Time of the first of several decisions; None if there is only one."""

    @property
    def began(self) -> float:
        """Time of the first decision."""
        return self.time if self.since is None else self.since


class PlannerReport(Message, frozen=True, omit_defaults=True):
    """The planner's observation and decisions, sent after each turn of its loop. None: the value could not be read."""

    watcher: str
    """Watcher of the planner; empty if the planner is no service of the graph."""
    policy: str
    acts: bool
    """Whether the planner applies its decisions, or only observes."""
    roles: tuple[RoleReport, ...]
    devices: float | None
    max_devices: int
    queue_waiting: int | None = None
    queue_in_hand: int | None = None
    changing: str | None = None
    """The action under way. Meanwhile the planner observes nothing."""
    decisions: tuple[DecisionReport, ...] = ()
    """The last decisions, the newest last."""
    endpoints: tuple[EndpointReport, ...] = ()
    """By endpoint, the oldest first, and role."""


# Between frontends: the metrics of each, so that each can show those of all.


MetricKind = Literal["counter", "gauge", "histogram", "gaugehistogram", "summary", "info", "stateset", "unknown"]
"""The kinds of metrics that Prometheus' client has."""

Labels = tuple[tuple[str, str], ...]


class MetricSample(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One value. `name` has the suffixes of Prometheus' text, such as `_bucket`. `labels` are sorted."""

    name: str
    labels: Labels
    value: float

    @property
    def series(self) -> tuple[str, Labels]:
        """What is the same for the same value in another process."""
        return self.name, self.labels


class MetricFamily(msgspec.Struct, frozen=True, array_like=True):
    """The values of one metric."""

    name: str
    kind: MetricKind
    help: str
    samples: tuple[MetricSample, ...]


class MetricShare(msgspec.Struct, frozen=True, omit_defaults=True):
    """The metrics of one frontend. `by_key`: families of which administrators are shown other samples, for each API
    key."""

    families: tuple[MetricFamily, ...] = ()
    by_key: tuple[MetricFamily, ...] = ()


class MetricsQuestion(Message, frozen=True):
    """Question for the metrics of a frontend."""


class MetricsAnswer(Message, frozen=True, omit_defaults=True):
    """The metrics of a frontend, and by lease the counters that it knows of frontends that have ended."""

    own: MetricShare
    ended: dict[str, MetricShare] = msgspec.field(default_factory=dict)
