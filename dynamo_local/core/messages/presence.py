"""Messages from every process to all others: presence, load and counts."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec

from dynamo_local.core.codec import Message

ProcessState = Literal["starting", "ready", "parked", "draining", "failed"]
"""`parked`: a worker whose engine is paused and has given its KV cache back; it takes requests once it is woken."""


OwnClock = Annotated[float | None, msgspec.Meta(description="of this process's clock")]
"""A moment of this process's own clock (CLOCK_MONOTONIC, s). Never in a message: see `as_sent` and `as_received`."""


class EngineInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """Properties of a worker's engine as it has started, which may differ from its configuration."""

    engine: str
    model: str
    max_model_len: int
    block_size: int
    kv_blocks: int
    max_num_seqs: int
    no_transfer: str | None = None
    """Why this engine can neither pull KV nor have it pulled; None if it can."""
    block_bytes: int | None = None
    """Size of a KV block in bytes, over all devices of the engine. None: not reported."""
    forgotten: tuple[str, ...] = ()
    """Sampling parameters whose state this engine cannot rebuild from a request's log (see Survival.rebuilt)."""
    tasks: tuple[str, ...] = ("generate",)
    """What the engine can be asked for, in vLLM's words: "generate", or for pooling models "embed", "classify", ..."""
    kv_events: bool = False
    """Whether the worker publishes which blocks it has cached (core/messages/kv.py)."""
    kv_network: str = ""
    """Closed network (CIDR) in which KV is read between this engine and others on other machines, or TLS_STREAM
    (core/messages/kv.py). Empty: none is."""


class EngineRates(msgspec.Struct, frozen=True, omit_defaults=True):
    """How fast a worker's engine has been lately, measured from its steps (core/fleet/rates.py). None: not measured.

    A step in which n requests decode takes `step_s + n * step_s_per_running`, each prompt token that is computed in
    it `prefill_s_per_token` more. A request runs for `held_s` in the mean, and has one of the worker's places as long.
    """

    prefill_s_per_token: float | None = None
    step_s: float | None = None
    step_s_per_running: float | None = None
    held_s: float | None = None


class ClassUsage(msgspec.Struct, frozen=True, array_like=True):
    """Running requests of a priority class (core/priority/classes.py), and the length of their contexts in tokens,
    prefixes that they share counted for each."""

    priority_class: str
    requests: int
    tokens: int


class Load(msgspec.Struct, frozen=True, omit_defaults=True):
    """A worker's load after its last engine step. None: not measured yet, which is not zero."""

    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    """Share of KV blocks that requests use, 0 to 1, without blocks that are only pinned for readers."""
    kv_pinned: float | None = None
    """Share of KV blocks that are kept only by pins, or for finished prefills, 0 to 1."""
    at: OwnClock = None
    """Time of measurement. The load of an engine that hangs is repeated, and stale by this."""
    head_tokens: int | None = None
    """KV cache that the first waiting request needs to begin, in tokens; 0: no request waits."""
    head_priority: int | None = None
    """Priority of that request; None: none waits, or it is not known which."""
    head_since: OwnClock = None
    """Since when it is the first."""
    by_class: tuple[ClassUsage, ...] | None = None
    """Running requests by class; classes of which none runs are left out."""
    preempted_tokens: int | None = None
    """Contexts of requests that wait although they have run: their KV was given to others, and is to be computed again,
    in tokens."""
    recomputed_tokens: int | None = None
    """Sum over all preemptions since the worker started of the contexts whose KV was given up, in tokens."""
    rates: EngineRates | None = None
    """How fast the engine has been. None: nothing was measured yet."""
    age_s: float | None = None
    """In messages, instead of `at`: time since the measurement, when the message was sent."""
    head_age_s: float | None = None
    """In messages, instead of `head_since`: for how long it had been the first."""


class EndedMigrations(msgspec.Struct, frozen=True, array_like=True):
    """Number of migrations that began for one reason and ended with one outcome (core/migration/protocol.py)."""

    reason: str
    outcome: str
    number: int


class MigrationCounts(msgspec.Struct, frozen=True, omit_defaults=True):
    """The migrations of a frontend since it started."""

    ended: tuple[EndedMigrations, ...] = ()
    pulled_bytes: int = 0
    """KV read by destinations, in bytes. Engines that do not report the size of a block are not counted."""
    gap_s: float | None = None
    """Gap of the last migration: from the last token before the cut to the first after it, in seconds."""
    gap_steps: float | None = None
    """The same gap in decode steps of the request."""

    @property
    def completed(self) -> int:
        """Number of migrations that were completed."""
        return sum(each.number for each in self.ended if each.outcome == "migrated")

    @property
    def not_completed(self) -> int:
        """Number of migrations that were not completed."""
        return sum(each.number for each in self.ended) - self.completed


class Counts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Counters of a process since it started. None: the process has no such counter."""

    requests: int | None = None
    """Epochs submitted to a worker."""
    prompt_tokens: int | None = None
    """Context tokens that a worker has computed: those neither cached nor pulled."""
    output_tokens: int | None = None
    """Tokens that a worker has generated."""
    prefill_s: float | None = None
    """Time for which a worker has had epochs without a first token: the time for which a prefill worker was busy."""
    assigned: int | None = None
    """Requests for which the router has found a worker."""
    unassigned: int | None = None
    """Requests for which the router has found no worker."""
    routed_tokens: int | None = None
    """Tokens of the contexts of requests for which the router has found a worker."""
    predicted_tokens: int | None = None
    """Those of them that the workers were expected to have cached."""
    pull_tokens: int | None = None
    """Tokens of prefixes that chosen workers were told to pull from others."""
    policy: str | None = None
    """The router's policy."""
    index_blocks: int | None = None
    """Different KV blocks that the router knows to be cached. Unlike the counters it falls again."""
    out_of_step: int | None = None
    """Workers of which the router misses messages about their caches. Falls again as well."""
    migrations: MigrationCounts | None = None
    """Migrations of a frontend."""
    in_flight: int | None = None
    """Sequences that a frontend has admitted for the presence's revision and not finished, those that wait for a worker
    included. Unlike the others it falls again."""
    held: int | None = None
    """Sequences among `in_flight` that are held because no worker is ready. Falls again as well."""
    queued: int | None = None
    """Asynchronous tasks that a frontend has not in hand. All frontends know of the same ones, so that those which
    another one has are among them."""
    taken: int | None = None
    """Asynchronous tasks that a frontend has in hand, which are among `in_flight`."""


class Exclusive(msgspec.Struct, frozen=True):
    """A worker is set apart for one request (core/request/recovery.py): it takes no other, and its own migrate."""

    request_id: str
    frontend: str
    free: bool
    """Whether all other requests have left the worker."""


class Presence(Message, frozen=True, omit_defaults=True):
    """Identity, state and load of a process, published twice a second and with every change; while nothing changes
    (`quiet`), every two seconds (core/beats.py).

    `lease` is new whenever the process is started. It names the process in all subjects and in the statefile.
    """

    watcher: str
    component: str
    role: str
    lease: str
    pid: int
    state: ProcessState
    detail: str = ""
    engine: EngineInfo | None = None
    load: Load | None = None
    url: str | None = None
    counts: Counts | None = None
    exclusive: Exclusive | None = None
    """Set by workers only."""
    started_at: OwnClock = None
    """When the process started."""
    quiet: bool = False
    machine: str = ""
    """Machine of the process (state/machine/identity.py); empty: not known."""
    failed_adapters: dict[str, str] = msgspec.field(default_factory=dict)
    """LoRA adapters that the worker cannot load as they are, by `ServedAdapter.key`, each with the reason."""
    up_s: float | None = None
    """In messages, instead of `started_at`: for how long the process had been running."""
    revision: str = ""
    """Text of the endpoint's revision that the process serves; empty: it serves no model of its own."""


def as_sent(presence: Presence, now: float, up_at: float) -> Presence:
    """A presence as a message that is sent at `now`, with ages instead of moments of this process's clock.

    `up_s` is as of `up_at`: a presence that says nothing new is sent with the same bytes, by which it is known.
    """
    load = presence.load
    if load is not None:
        load = msgspec.structs.replace(
            load, at=None, head_since=None, age_s=_age(load.at, now), head_age_s=_age(load.head_since, now)
        )
    return msgspec.structs.replace(presence, load=load, started_at=None, up_s=_age(presence.started_at, up_at))


def as_received(presence: Presence, now: float) -> Presence:
    """Inverse of `as_sent` for a message that arrived at `now`: moments of the receiver's clock instead of ages."""
    load = presence.load
    if load is not None:
        load = msgspec.structs.replace(
            load, at=_moment(load.age_s, now), head_since=_moment(load.head_age_s, now), age_s=None, head_age_s=None
        )
    return msgspec.structs.replace(presence, load=load, started_at=_moment(presence.up_s, now), up_s=None)


def _age(moment: float | None, now: float) -> float | None:
    return None if moment is None else max(now - moment, 0.0)


def _moment(age_s: float | None, now: float) -> float | None:
    return None if age_s is None or not math.isfinite(age_s) else now - max(age_s, 0.0)


class LeaseLost(Message, frozen=True):
    """The process of the lease has been silent for too long, or has said that it ends: what waits for its answer waits
    no more."""

    lease: str


class LeaseRevoked(Message, frozen=True):
    """The lease is void: its process drains, and no request is routed to it any more."""

    lease: str
