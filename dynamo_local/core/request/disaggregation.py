"""Decides whether a prompt is prefilled by the worker that will decode it, or by a prefill worker. Pure.

Remote prefill is never needed: whenever something is unknown, the prompt is prefilled locally, which always works.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from dynamo_local.core.priority.classes import PriorityClass, class_of
from dynamo_local.core.priority.fair_queue import Claim, FairQueue


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


# Whose prompt is prefilled next: keys take turns among the jobs of one frontend that wait in the prefill queue. Pure.
#
# A job that comes out of the queue is an invitation to its frontend, whichever prompt it was published for. The
# frontend gives the worker the prompt whose turn it is (core/priority/fair_queue.py), of the job's class.

Job = TypeVar("Job")


class JobTurns(Generic[Job]):
    """The jobs that wait in the queue. They are hashable."""

    def __init__(self, tokens: Callable[[Job], int]) -> None:
        """`tokens`: length of a job's prompt."""
        self._queues = {one: FairQueue(tokens) for one in PriorityClass}
        self._claims: dict[Job, Claim] = {}
        self._waiting = {one: Counter[str]() for one in PriorityClass}
        """Jobs by key."""

    def __contains__(self, job: Job) -> bool:
        return job in self._claims

    def add(self, job: Job, claim: Claim) -> None:
        """Count a job as waiting, which is in the queue now."""
        self._claims[job] = claim
        self._waiting[class_of(claim.priority)][claim.key] += 1
        self._queues[class_of(claim.priority)].add(job, claim)

    def discard(self, job: Job) -> None:
        """Count it as waiting no more, if it was: it has ended."""
        if job in self._claims:
            self._queues[self._forget(job)].remove(job)

    def take(self, job: Job) -> Job:
        """Return the job whose turn it is, when this one comes out of the queue; it waits no more. One that does not
        wait, because it has come out before, has its turn again."""
        if job not in self._claims:
            return job
        turn = self._queues[class_of(self._claims[job].priority)].pop()
        self._forget(turn)
        return turn

    def of(self, one: PriorityClass) -> int:
        """How many jobs of this class wait."""
        return self._waiting[one].total()

    def before(self, one: PriorityClass, key: str) -> int:
        """How many jobs of this class have their turn before another one of this key, if all prompts are as long."""
        waiting = self._waiting[one]
        has = waiting[key]
        return has + sum(min(number, has + 1) for other, number in waiting.items() if other != key)

    def _forget(self, job: Job) -> PriorityClass:
        claim = self._claims.pop(job)
        one = class_of(claim.priority)
        self._waiting[one][claim.key] -= 1
        if not self._waiting[one][claim.key]:
            del self._waiting[one][claim.key]
        return one
