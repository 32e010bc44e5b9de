"""Messages from workers to frontends: tokens, and pooled outputs."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from dynamo_local.core.codec import Message

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
