"""What happens to a server and its processes: one record for each event, for `dynamo events`.

The server writes all events of its namespace to one file. Other processes publish theirs on the bus.
"""

from __future__ import annotations

from dynamo_local.core.codec import Message

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
