"""What processes tell each other, hop by hop. Frozen, versioned, msgpack (codec.py).

    every process      -> all            Presence        who I am, how I am, how loaded I am
    operator, planner  -> all            LeaseRevoked    route nothing to this process any more
    frontend           -> router         AssignRequest   which worker?          (reply: Assignment)
    frontend           -> router         Released        this request has left its worker
    frontend           -> router         Charges         all of its requests that are with workers
    frontend           -> worker         Submit, Cancel, Ack, Resend, AskExclusive, EndExclusive
    worker             -> frontend       TokenBatch      one an engine step, with all of that frontend's tokens
    frontend           -> worker         CachedQuestion  how much of this prompt is cached?    (reply: CachedAnswer)
    frontend           -> prefill queue  PrefillJob      somebody prefill this request of mine
    prefill worker     -> frontend       PrefillClaim    I would                               (reply: PrefillGrant)
    worker             -> worker         PinQuestion     keep these blocks while I read them   (reply: PinAnswer)
    worker             -> worker         Unpin           I have read them
    operator, planner  -> worker         RoleQuestion    take up another role                  (reply: RoleAnswer)
    operator, planner  -> server         HoldQuestion    hold the devices that are claimed     (reply: Holds)

What moves requests is in move_messages.py, what the planner tells in planner_messages.py.

Times are seconds. `timestamp`s are CLOCK_MONOTONIC, which all processes of a machine share. Positions are 0-based
indices into a request's output. Lengths and loads are in tokens unless the name says otherwise.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec

from dynamo_local.core.codec import VERSION

ProcessState = Literal["starting", "ready", "draining", "failed"]
FinishReason = Literal["stop", "length", "abort", "error", "repetition"]
Fault = Literal["request", "deaths"]


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


class MoveCounts(msgspec.Struct, frozen=True, omit_defaults=True):
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
    moves: MoveCounts | None = None
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


class AssignRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which worker is to take this request? `avoid` names leases that just failed it."""

    request_id: str
    frontend: str
    tokens: int
    avoid: tuple[str, ...] = ()
    v: int = VERSION


class Assignment(msgspec.Struct, frozen=True, omit_defaults=True):
    """The router's answer. None: no worker is routable."""

    worker: str | None
    v: int = VERSION


class Charge(msgspec.Struct, frozen=True, array_like=True):
    """A request that burdens a worker."""

    request_id: str
    worker: str
    tokens: int


class Charges(msgspec.Struct, frozen=True):
    """All that a frontend has with workers now; told now and then, so that words that were lost do no lasting harm."""

    frontend: str
    charges: tuple[Charge, ...]
    v: int = VERSION


class Released(msgspec.Struct, frozen=True):
    """The request no longer burdens the worker it was assigned to."""

    request_id: str
    frontend: str
    v: int = VERSION


class Submit(msgspec.Struct, frozen=True, omit_defaults=True, tag="submit"):
    """Work on this request under this epoch, starting at output position `position`.

    `token_ids` is the prompt followed by the `position` tokens accepted so far. `sampling` is the engine's own
    parameter map in msgpack (for vLLM: SamplingParams by field name), with token limits already reduced by
    `position`; an engine reads the fields that it knows. What counts the output counts it from the first one on.

    `source` is the lease of a worker that has the KV of this context, or most of it, to be pulled. `hold_s` > 0: when
    the request has finished, its full blocks stay for readers until it is cancelled, at most so many seconds.

    `exclusive`: only if the worker is set apart for this request, and free.

    `adapter` names a LoRA adapter. What a name stands for is the worker's configuration, and never a client's to say.

    `reasoning_parser_kwargs` are arguments of the engine's reasoning parser, which tell it how the prompt was made, in
    msgpack. `session_id` and `trace_headers` are the client's own words for what the request belongs to.
    """

    request_id: str
    epoch: int
    frontend: str
    token_ids: list[int]
    sampling: msgspec.Raw
    position: int = 0
    arrival_time: float = 0.0
    priority: int = 0
    cache_salt: str | None = None
    adapter: str | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: bytes | None = None
    session_id: str | None = None
    trace_headers: dict[str, str] | None = None
    source: str | None = None
    hold_s: float = 0.0
    exclusive: bool = False
    v: int = VERSION


class RequestEpoch(msgspec.Struct, frozen=True, array_like=True):
    """One assignment of one request."""

    request_id: str
    epoch: int

    def __str__(self) -> str:
        return f"{self.request_id}#{self.epoch}"


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """The frontend is done with these: it has all that it wants, or wants nothing any more.

    The worker stops, frees their KV blocks, and forgets the tokens it has kept. Unknown ones are ignored.
    """

    requests: tuple[RequestEpoch, ...]
    v: int = VERSION


class Progress(msgspec.Struct, frozen=True, array_like=True):
    """How far the frontend has got with an epoch: it has accepted all positions below `position`."""

    request_id: str
    epoch: int
    position: int


class Ack(msgspec.Struct, frozen=True, tag="ack"):
    """The worker need not keep tokens below these positions. Sent now and then, not for every step."""

    progress: tuple[Progress, ...]
    v: int = VERSION


class Resend(msgspec.Struct, frozen=True, tag="resend"):
    """Send again everything from these positions on. Asked after a gap, and after a silence.

    The worker answers for each, at once: with the tokens, with an empty delta if there are none yet, or with a
    refusal if it does not know the epoch (the submission was lost, or this process is another one).
    """

    frontend: str
    progress: tuple[Progress, ...]
    v: int = VERSION


class Array(msgspec.Struct, frozen=True, array_like=True):
    """A dense array, little-endian, C order. `dtype` is one of int32, int64, float32."""

    dtype: Literal["int32", "int64", "float32"]
    shape: tuple[int, ...]
    data: bytes

    def __post_init__(self) -> None:
        item_bytes = 8 if self.dtype == "int64" else 4
        if not self.shape or min(self.shape) < 0 or math.prod(self.shape) * item_bytes != len(self.data):
            raise ValueError(f"{len(self.data)} bytes are no {self.dtype} array of shape {self.shape}")

    def without_first(self, rows: int) -> Array:
        """The array without its first rows (all of them, if it has no more)."""
        kept = max(self.shape[0] - rows, 0)
        row_bytes = len(self.data) // self.shape[0] if self.shape[0] else 0
        return Array(self.dtype, (kept, *self.shape[1:]), self.data[len(self.data) - kept * row_bytes :])


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of n positions, k+1 candidates each (the chosen token first).

    token_ids and logprobs have shape (n, k+1), ranks has shape (n,).
    """

    token_ids: Array
    logprobs: Array
    ranks: Array

    def __post_init__(self) -> None:
        shape = self.token_ids.shape
        if len(shape) != 2 or self.logprobs.shape != shape or self.ranks.shape != shape[:1]:
            raise ValueError(f"shapes {shape}, {self.logprobs.shape}, {self.ranks.shape} do not match")

    def without_first(self, positions: int) -> Logprobs:
        """The log-probabilities of all but the first positions."""
        return Logprobs(
            self.token_ids.without_first(positions),
            self.logprobs.without_first(positions),
            self.ranks.without_first(positions),
        )


class TokenDelta(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """New tokens of one request: `token_ids[i]` stands at output position `position + i`."""

    request_id: str
    epoch: int
    position: int
    token_ids: list[int]
    finish: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    """Why the request failed, for its client; only with finish == "error". A failure brings no tokens, and
    its position says nothing: a worker that gives a request up need not know how far it had come."""
    refused: bool = False
    """With finish == "error": the worker does not have the request (it drains, or never got it); another one may."""
    failed: bool = False
    """With finish == "error": the worker is at fault, not the request; another one may do better."""
    fault: Fault | None = None
    """With finish == "error": "request" if what its client asks for cannot be done, here or elsewhere: it is told so at
    once, nothing is tried again, and nobody else is to blame. "deaths", from a frontend only: engines died of it.
    None: neither (its state was lost, or no worker was there), or it is one of the two above."""
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    cached_tokens: int | None = None
    """Prompt tokens found in the worker's cache; told once, with the first token."""
    events: tuple[tuple[int, float], ...] = ()
    """Scheduling events (kind, timestamp): 1 queued, 2 scheduled, 3 preempted."""
    created_tokens: int = 0
    """Prompt tokens that the worker has put into its cache; told with `cached_tokens`."""


class TokenBatch(msgspec.Struct, frozen=True, array_like=True):
    """All that one engine step brought for one frontend. `seq` counts a worker's batches to that frontend."""

    worker: str
    seq: int
    timestamp: float
    deltas: tuple[TokenDelta, ...]
    v: int = VERSION


class CachedQuestion(msgspec.Struct, frozen=True, omit_defaults=True):
    """How many leading tokens of this prompt need no computing at the worker asked?"""

    token_ids: list[int]
    cache_salt: str | None = None
    adapter: str | None = None
    v: int = VERSION


class CachedAnswer(msgspec.Struct, frozen=True):
    """So many tokens, a multiple of the block size."""

    tokens: int
    v: int = VERSION


class PrefillJob(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request of `frontend` that wants its prompt prefilled. Who takes the job claims the request there.

    `job` is new for every publication. After `deadline` (CLOCK_MONOTONIC, s) nobody waits for it any more.
    """

    job: str
    request_id: str
    frontend: str
    tokens: int
    deadline: float
    v: int = VERSION


class PrefillClaim(msgspec.Struct, frozen=True):
    """`worker` (its lease) has taken the job from the queue and would work on it. Each delivery claims anew."""

    job: str
    request_id: str
    worker: str
    delivery: int
    """1 for the first delivery of the job."""
    v: int = VERSION


class PrefillGrant(msgspec.Struct, frozen=True, omit_defaults=True):
    """The request under a new epoch, to be prefilled; or None: it needs no prefill any more, drop the job."""

    work: Submit | None = None
    v: int = VERSION


MOST_REST = 4096
"""Tokens behind the full blocks of a context: fewer than any block has."""


class PinQuestion(msgspec.Struct, frozen=True, omit_defaults=True):
    """Keep the blocks with these hashes, as many leading ones as there are, until `until` (CLOCK_MONOTONIC, s).

    `fingerprint` is the reader's: KV is read only between engines that agree on everything that gives it its meaning.
    """

    pin: str
    """Names the pin; unique to the reader's attempt."""
    fingerprint: str
    hashes: tuple[bytes, ...]
    until: float
    rest: Annotated[tuple[int, ...], msgspec.Meta(max_length=MOST_REST)] = ()
    """Tokens behind these blocks, whose KV is wanted as well if a request that runs there has it."""
    v: int = VERSION


class PinAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """`blocks` leading blocks are written, and will not be reused before `until` unless the reader unpins them.

    With blocks == 0 nothing is pinned, and `refused` says why. `rest`: of so many tokens behind them, one more block is
    pinned, which somebody goes on writing to. `handle` is the engine's own word to its like: where and what to read.
    """

    blocks: int
    until: float = 0.0
    handle: msgspec.Raw = msgspec.Raw(b"\xc0")
    refused: str | None = None
    rest: int = 0
    v: int = VERSION


class Unpin(msgspec.Struct, frozen=True, tag="unpin"):
    """The reader has read, or given up. Unknown pins are ignored."""

    pins: tuple[str, ...]
    v: int = VERSION


class AskExclusive(msgspec.Struct, frozen=True, tag="ask_exclusive"):
    """The worker is to be set apart for this request. It tells so with its presence. Said again and again until the
    request is submitted: if that ends, so does it."""

    request_id: str
    frontend: str
    v: int = VERSION


class EndExclusive(msgspec.Struct, frozen=True, tag="end_exclusive"):
    """The worker need not be set apart for this request any more."""

    request_id: str
    frontend: str
    v: int = VERSION


class RoleQuestion(msgspec.Struct, frozen=True):
    """Take up this role."""

    role: str
    v: int = VERSION


class RoleAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The role that the worker has now; `refused` says why it is not the one asked for."""

    role: str
    refused: str | None = None
    v: int = VERSION


class HoldQuestion(msgspec.Struct, frozen=True):
    """Hold on the machine what the statefile says, and let go of the rest."""

    v: int = VERSION


class Holds(msgspec.Struct, frozen=True):
    """By device: who holds it on the machine, where that is somebody else."""

    refused: dict[int, str]
    v: int = VERSION


Work = Submit | Cancel | Ack | Resend | Unpin | AskExclusive | EndExclusive
