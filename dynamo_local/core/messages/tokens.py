"""Messages of a worker to a frontend: tokens."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from dynamo_local.core.codec import VERSION

FinishReason = Literal["stop", "length", "abort", "error", "repetition"]


Fault = Literal["request", "deaths"]


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
