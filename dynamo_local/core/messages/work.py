"""Messages between frontends and workers: work, tokens, prefill jobs, and migrations."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from dynamo_local.core.codec import Message
from dynamo_local.core.messages.kv import Unpin


class Submit(Message, frozen=True, omit_defaults=True, tag="submit"):
    """Order to work on a request under this epoch, from output position `position` on.

    `token_ids` is the prompt followed by the `position` tokens accepted so far. `sampling` is the engine's own
    parameter map in msgpack (for vLLM: SamplingParams by field name), with token limits already reduced by
    `position`; an engine reads the fields that it knows. Parameters that depend on the number of output tokens count
    from position 0.

    `source` is the lease of a worker from which the KV of this context, or most of it, can be pulled. `hold_s` > 0: the
    full blocks of the finished request are kept for readers until it is cancelled, at most so many seconds.

    `key`: the API key that the request came with, for fairness among keys; empty: none.

    `pools`: the pooled output of the prompt is wanted, and no token. `sampling` then has the engine's pooling
    parameters.

    `exclusive`: take the request only if the worker is set apart for it, and free.

    `adapter` names a LoRA adapter. Which files a name stands for is configured at the worker, never by a client.

    `reasoning_parser_kwargs` are arguments of the engine's reasoning parser, about how the prompt was made, in msgpack.
    `session_id` and `trace_headers` come from the client, and say to what the request belongs.
    """

    request_id: str
    epoch: int
    frontend: str
    token_ids: list[int]
    sampling: msgspec.Raw
    position: int = 0
    arrival_time: float = 0.0
    priority: int = 0
    key: str = ""
    cache_salt: str | None = None
    adapter: str | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: bytes | None = None
    session_id: str | None = None
    trace_headers: dict[str, str] | None = None
    source: str | None = None
    hold_s: float = 0.0
    exclusive: bool = False
    pools: bool = False


class RequestEpoch(msgspec.Struct, frozen=True, array_like=True):
    """The name of one assignment of a request to a worker."""

    request_id: str
    epoch: int

    def __str__(self) -> str:
        return f"{self.request_id}#{self.epoch}"


class Cancel(Message, frozen=True, tag="cancel"):
    """The frontend has finished or cancelled these requests.

    The worker stops them, frees their KV blocks, and drops the tokens that it has kept. Unknown requests are ignored.
    """

    requests: tuple[RequestEpoch, ...]


class Progress(msgspec.Struct, frozen=True, array_like=True):
    """Position of a frontend in an epoch: it has accepted all positions below `position`."""

    request_id: str
    epoch: int
    position: int


class Ack(Message, frozen=True, tag="ack"):
    """The worker may drop its tokens below these positions. Sent at intervals, not for every step."""

    progress: tuple[Progress, ...]


class Resend(Message, frozen=True, tag="resend"):
    """Order to send all tokens from these positions on again, after a gap or a silence.

    The worker sends a delta for each at once: with the tokens, empty if there are none yet, or a refusal if it does not
    know the epoch (the submission was lost, or this is another process).
    """

    frontend: str
    progress: tuple[Progress, ...]


class AskExclusive(Message, frozen=True, tag="ask_exclusive"):
    """Order to set the worker apart for this request; the worker confirms with its presence. Repeated until the request
    is submitted; without repetition the state ends."""

    request_id: str
    frontend: str


class EndExclusive(Message, frozen=True, tag="end_exclusive"):
    """Order to take other requests again."""

    request_id: str
    frontend: str


Work = Submit | Cancel | Ack | Resend | Unpin | AskExclusive | EndExclusive


# From workers to frontends: tokens, and pooled outputs.


FinishReason = Literal["stop", "length", "abort", "error", "repetition"]

Fault = Literal["request", "deaths"]

QUEUED, SCHEDULED, PREEMPTED = 1, 2, 3
"""Kinds of scheduling events, numbered as by vLLM."""


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
    """Log-probabilities of n positions, with k+1 candidates each (the chosen token first).

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
    """Why the request failed, for its client; only with finish == "error". Such a delta has no tokens, and its position
    means nothing: a worker that fails a request need not know how far it had come."""
    refused: bool = False
    """With finish == "error": the worker does not take the request (it drains, or does not know it); another may."""
    failed: bool = False
    """With finish == "error": the worker is at fault, not the request; another may do better."""
    fault: Fault | None = None
    """With finish == "error", the kind of fault. "request": the client asks for something that no worker can do, and is
    told so at once, without another attempt. "deaths", set by frontends only: engines died of the request. None:
    neither (the request's state was lost, or no worker was there), or one of the two flags above is set."""
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    cached_tokens: int | None = None
    """Prompt tokens found in the worker's cache; set once, with the first token."""
    events: tuple[tuple[int, float], ...] = ()
    """Scheduling events (kind, age): QUEUED, SCHEDULED or PREEMPTED; so many seconds before the end of the engine
    step that the delta came with."""
    created_tokens: int = 0
    """Prompt tokens that the worker has added to its cache; set with `cached_tokens`."""
    pooled: Array | None = None
    """What a pooling model has made of the prompt, in the only delta of such a request, which has no tokens: shape (n,)
    for the whole prompt, (tokens, n) where each token has its own."""


class TokenBatch(Message, frozen=True, array_like=True):
    """The output of one engine step for one frontend. `seq` counts the batches from this worker to that frontend."""

    worker: str
    seq: int
    deltas: tuple[TokenDelta, ...]


# Between frontends and prefill workers: jobs, claims, grants.


class PrefillJob(Message, frozen=True, omit_defaults=True):
    """A request of `frontend` whose prompt is to be prefilled. The worker that takes the job claims the request there.

    `job` is new for every publication. The job is void once it is older than `valid_s` seconds, which its frontend
    knows, and is asked. `priority` is that of the request.
    """

    job: str
    request_id: str
    frontend: str
    tokens: int
    valid_s: float
    priority: int = 0


class PrefillClaim(Message, frozen=True):
    """Question for the request of a job that `worker` (a lease) has taken. Sent for each delivery of the job."""

    job: str
    request_id: str
    worker: str
    delivery: int
    """1 for the first delivery of the job."""


class PrefillGrant(Message, frozen=True, omit_defaults=True):
    """The request to be prefilled, under a new epoch; None if it needs no prefill any more, and the job is void."""

    work: Submit | None = None


class QueueLength(msgspec.Struct, frozen=True):
    """Length of a prefill queue. `waiting`: jobs never delivered; `in_hand`: jobs delivered and not done, which a
    worker has or which wait to be delivered again."""

    waiting: int
    in_hand: int


# From frontends to the destinations of migrations (core/migration/protocol.py).


class Reserve(Message, frozen=True, omit_defaults=True, tag="reserve"):
    """Order to reserve a run slot and blocks for `tokens` tokens, for `keep_s` seconds.

    The reservation ends earlier when the request is submitted, when it is cancelled, and when `frontend`, whose request
    it is, is gone. A second one for the same request replaces the first.

    `floor`: reserve only if the worker's freeness, in steps, stays at least at that with all its reservations, of which
    the frontend knows only its own.
    """

    request_id: str
    frontend: str
    tokens: int
    keep_s: float
    floor: float | None = None


class Warm(Message, frozen=True, omit_defaults=True, tag="warm"):
    """Order to get the KV of `token_ids`: pull the full blocks from `source`, compute the rest. There must be a
    reservation for the request, for as long as which the KV is held. Answered when the KV is there.

    The frontend waits for the answer for `within_s` seconds.
    """

    request_id: str
    source: str
    token_ids: list[int]
    within_s: float
    cache_salt: str | None = None
    adapter: str | None = None
    priority: int = 0
    key: str = ""


class CancelReservation(Message, frozen=True, tag="cancel_reservation"):
    """Order to end a reservation: the request does not come. Unknown requests are ignored."""

    request_id: str


class MigrationAnswer(Message, frozen=True, omit_defaults=True):
    """Confirms an order, or says in `refused` why it is not carried out. To a Warm, `pulled_tokens` were read from the
    source, `pulled_bytes` their KV; None if the engine does not report its size."""

    refused: str | None = None
    pulled_tokens: int = 0
    pulled_bytes: int | None = None


MigrationRequest = Reserve | Warm | CancelReservation
"""Requests of a frontend on a worker's subject for migrations."""
