"""Whose prompt is prefilled next: keys take turns among the jobs of one frontend that wait in the prefill queue. Pure.

A job that comes out of the queue is an invitation to its frontend, whichever prompt it was published for. The frontend
gives the worker the prompt whose turn it is (core/priority/fair_queue.py), of the job's class.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Generic, TypeVar

from dynamo_local.core.priority.classes import PriorityClass, class_of
from dynamo_local.core.priority.fair_queue import Claim, FairQueue

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
