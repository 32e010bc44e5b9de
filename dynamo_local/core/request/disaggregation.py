"""Decides whether a prompt is prefilled by the worker that will decode it, or by a prefill worker. Pure.

Remote prefill is never needed: whenever something is unknown, the prompt is prefilled locally, which always works.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True)
class PrefillLimits:
    """When a prompt is worth being prefilled by another worker.

    `max_local_prefill_length`: longest part of a prompt, in tokens, that a decode worker computes itself.
    `max_prefill_queue_size`: with so many jobs waiting, or more, no further job is added.
    """

    max_local_prefill_length: int
    max_prefill_queue_size: int


class PrefillReason(StrEnum):
    """Why a prompt is prefilled where it is. The words are labels of metrics."""

    LONG = "long"
    """Remotely: there is much to compute, and a prefill worker to do it."""
    SHORT = "short"
    CACHED = "cached"
    """Long, but the decode worker has most of its KV."""
    NO_WORKER = "no_worker"
    QUEUE_FULL = "queue_full"
    UNKNOWN_CACHE = "unknown_cache"
    """The decode worker has not answered how much it has cached."""
    UNKNOWN_QUEUE = "unknown_queue"
    """The queue's length cannot be read."""


@dataclass(frozen=True)
class PrefillDecision:
    """The decision where a prompt is prefilled, and its reason."""

    remote: bool
    reason: PrefillReason


def worth_asking(prompt_tokens: int, limits: PrefillLimits) -> bool:
    """Return whether the other arguments of `decide` matter: a short prompt is prefilled locally in any case."""
    return prompt_tokens > limits.max_local_prefill_length


def decide(
    prompt_tokens: int,
    cached_tokens: int | None,
    queue_waiting: int | None,
    prefill_workers: int,
    limits: PrefillLimits,
) -> PrefillDecision:
    """Return where the prompt is prefilled: remotely if and only if more than `max_local_prefill_length` tokens are not
    cached at the decode worker, fewer than `max_prefill_queue_size` jobs wait, and there is a ready prefill worker.

    `cached_tokens` and `queue_waiting` are None when they are not known.
    """
    if not worth_asking(prompt_tokens, limits):
        return _local(PrefillReason.SHORT)
    if prefill_workers <= 0:
        return _local(PrefillReason.NO_WORKER)
    if cached_tokens is None:
        return _local(PrefillReason.UNKNOWN_CACHE)
    if prompt_tokens - cached_tokens <= limits.max_local_prefill_length:
        return _local(PrefillReason.CACHED)
    if queue_waiting is None:
        return _local(PrefillReason.UNKNOWN_QUEUE)
    if queue_waiting >= limits.max_prefill_queue_size:
        return _local(PrefillReason.QUEUE_FULL)
    return PrefillDecision(remote=True, reason=PrefillReason.LONG)


def _local(reason: PrefillReason) -> PrefillDecision:
    return PrefillDecision(remote=False, reason=reason)
