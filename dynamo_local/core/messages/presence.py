"""Messages of every process to all: presence and load."""

from __future__ import annotations

from typing import Literal

import msgspec

from dynamo_local.core.codec import VERSION

ProcessState = Literal["starting", "ready", "draining", "failed"]


class EngineInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a frontend must know of the engine behind a worker, as it came up (not as it was configured)."""

    engine: str
    model: str
    max_model_len: int
    block_size: int
    kv_blocks: int
    max_num_seqs: int
    no_transfer: str | None = None
    """Why KV blocks go neither from this engine to another one nor the other way; None: they do."""
    block_bytes: int | None = None
    """Size of a KV block, on all its devices together. None: the engine does not tell."""
    forgotten: tuple[str, ...] = ()
    """Sampling parameters whose state this engine cannot rebuild from a request's log (see Survival.rebuilt)."""


class Load(msgspec.Struct, frozen=True, omit_defaults=True):
    """A worker's load after its last engine step. None: not measured yet, which is not zero."""

    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    """Share of KV blocks in use by requests, 0 to 1. Blocks that are only pinned for readers are not in it."""
    kv_pinned: float | None = None
    """Share of KV blocks that only readers, and holds of finished prefills, keep from being reused, 0 to 1."""
    at: float | None = None
    """When it was measured (CLOCK_MONOTONIC, s). An engine that hangs repeats its last load: by this, it is stale."""
    head_tokens: int | None = None
    """What the first of the waiting requests needs to begin, in tokens of KV cache; 0: none waits."""


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """How many moves that began for one reason have ended in one way (moves.py)."""

    reason: str
    outcome: str
    moves: int


class MigrationCounts(msgspec.Struct, frozen=True, omit_defaults=True):
    """The moves of a frontend in its life."""

    ended: tuple[Ended, ...] = ()
    pulled_bytes: int = 0
    """Of KV, read by destinations. Those of engines that do not tell are not counted."""
    gap_s: float | None = None
    """Of the last one: from the last token before it to the first after it."""
    gap_steps: float | None = None
    """The same in steps of the request before."""

    @property
    def moved(self) -> int:
        """Those that were brought to their end."""
        return sum(each.moves for each in self.ended if each.outcome == "moved")

    @property
    def not_moved(self) -> int:
        """All others."""
        return sum(each.moves for each in self.ended) - self.moved


class Counts(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a process has counted in its life. None: it counts no such thing."""

    requests: int | None = None
    """Epochs that a worker has taken."""
    prompt_tokens: int | None = None
    """Tokens that a worker has computed to begin its epochs: those neither cached nor pulled."""
    output_tokens: int | None = None
    """Tokens that a worker has put out."""
    prefill_s: float | None = None
    """Time for which a worker has had epochs without a token yet: a prefill worker is busy then, and idle else."""
    assigned: int | None = None
    """Requests that a router has found a worker for."""
    unassigned: int | None = None
    """Requests that a router has found no worker for."""
    moves: MigrationCounts | None = None
    """Of a frontend."""


class Exclusive(msgspec.Struct, frozen=True):
    """A worker is set apart for one request (suspicion.py): it takes no other one, and those that it has leave it."""

    request_id: str
    frontend: str
    free: bool
    """The other requests of the worker have left."""


class Presence(msgspec.Struct, frozen=True, omit_defaults=True):
    """A process tells of itself, every half second and whenever something changes; while it is `quiet`, every two
    seconds (core/beats.py).

    `lease` is new for every incarnation of a process; it names the process in all subjects and in the statefile.
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
    """Of a worker."""
    started_at: float | None = None
    """CLOCK_MONOTONIC, when the process came to be."""
    quiet: bool = False
    v: int = VERSION


class LeaseRevoked(msgspec.Struct, frozen=True):
    """The lease is void from now on. Its process drains, everybody else forgets it."""

    lease: str
    v: int = VERSION
