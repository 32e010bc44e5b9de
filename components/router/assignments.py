"""The router's account of its assignments: counts, and the latest ones with what they were chosen by."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from itertools import islice

from msgspec.structs import replace

from dynamo_local.core.messages.presence import Counts
from dynamo_local.core.messages.routes import RouteRow, RoutesQuestion, WeighedWorker
from dynamo_local.core.messages.routing import Assignment, AssignRequest
from dynamo_local.core.routing.explanation import route_row

_KEPT = 128
"""Number of assignments that are kept to be explained."""

_MOST_TOLD = 100
"""Bound on the assignments of an answer, which is one message."""


@dataclass(frozen=True)
class Routed:
    """An answer to a frontend, and the figures of all candidates."""

    assignment: Assignment
    costs: tuple[WeighedWorker, ...] = ()


@dataclass(frozen=True)
class _Kept:
    request: AssignRequest
    routed: Routed
    revision: str
    at: float


class Assignments:
    """The assignments of all models."""

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._assigned = self._unassigned = self._tokens = self._predicted = self._pulls = 0
        self._latest: deque[_Kept] = deque(maxlen=_KEPT)
        """The latest first."""

    def add(self, request: AssignRequest, routed: Routed, revision: str) -> None:
        """Enter an answer to a frontend."""
        self._latest.appendleft(_Kept(replace(request, blocks=b""), routed, revision, time.monotonic()))
        if routed.assignment.worker is None:
            self._unassigned += 1
            return
        self._assigned += 1
        self._tokens += request.tokens
        self._predicted += routed.assignment.cached or 0
        self._pulls += _to_pull(routed)

    def counts(self, *, index_blocks: int, out_of_step: int) -> Counts:
        """What the router's presence tells."""
        return Counts(
            assigned=self._assigned,
            unassigned=self._unassigned,
            routed_tokens=self._tokens,
            predicted_tokens=self._predicted,
            pull_tokens=self._pulls,
            policy=self._policy,
            index_blocks=index_blocks,
            out_of_step=out_of_step,
        )

    def latest(self, question: RoutesQuestion) -> tuple[RouteRow, ...]:
        """The latest assignments, the latest first."""
        wanted = question.revisions
        kept = (each for each in self._latest if wanted is None or each.revision in wanted)
        now = time.monotonic()
        return tuple(_row(each, now) for each in islice(kept, min(question.limit, _MOST_TOLD)))


def _to_pull(routed: Routed) -> int:
    """Tokens that the chosen worker lacks, and another one, from which it is to pull them, has."""
    worker, source = routed.assignment.worker, routed.assignment.pull_from
    if source is None or worker is None:
        return 0
    had = {each.worker: each.cached for each in routed.costs}
    return had[source] - had[worker]


def _row(kept: _Kept, now: float) -> RouteRow:
    routed = kept.routed
    return route_row(kept.request, routed.assignment, routed.costs, revision=kept.revision, age_s=now - kept.at)
