"""The router's account of its assignments."""

from __future__ import annotations

from dynamo_local.core.messages.presence import Counts
from dynamo_local.core.messages.routing import Assignment, AssignRequest


class Assignments:
    """Counts assignments, and the tokens that are expected to be cached."""

    def __init__(self) -> None:
        self._assigned = self._unassigned = self._tokens = self._predicted = 0

    def add(self, request: AssignRequest, assignment: Assignment) -> None:
        """Count an answer to a frontend."""
        if assignment.worker is None:
            self._unassigned += 1
            return
        self._assigned += 1
        self._tokens += request.tokens
        self._predicted += assignment.cached or 0

    def counts(self, *, index_blocks: int, out_of_step: int) -> Counts:
        """What the router's presence tells."""
        return Counts(
            assigned=self._assigned,
            unassigned=self._unassigned,
            routed_tokens=self._tokens,
            predicted_tokens=self._predicted,
            index_blocks=index_blocks,
            out_of_step=out_of_step,
        )
