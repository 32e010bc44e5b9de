"""When a task whose answer is no result is tried again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from components.frontend.http.own_requests import AGAIN, FAULTS, backoff_s

_UNKNOWN_MODEL_S = 120.0
"""Time for which the model of a task may be unknown: after a restart, endpoints come one by one."""

_UNKNOWN, _REFUSED = 404, frozenset({404, 429, 503})
"""What the owner's other tasks for the model would be answered as well: there is no room, no worker, or no model."""


class Again(NamedTuple):
    """A task is to be gone on with after `pause_s` seconds. `is_refused`: its owner's line has to wait, not the task
    alone."""

    pause_s: float
    is_refused: bool = False


@dataclass
class Tries:
    """What has come of a task in this frontend that is no result. Times are CLOCK_MONOTONIC, in s.

    It is not on the disk: a restart, and another frontend, begin anew. That gives a task more time, and never less.
    """

    first_at: float | None = None
    unknown_at: float | None = None
    faults: int = 0
    others: int = 0
    """Answers that were neither faults nor refusals."""

    def begin(self, now: float) -> None:
        """Note that the task is tried now."""
        if self.first_at is None:
            self.first_at = now

    def note(self, status: int, now: float, patience_s: float) -> Again | None:
        """Note an answer. Returns when the task is to be tried again; None: the answer is the result."""
        self.unknown_at = None if status != _UNKNOWN else self.unknown_at if self.unknown_at is not None else now
        self.faults += status == 500
        if not self._is_tried_again(status, now, patience_s):
            return None
        if status in _REFUSED:
            return Again(0.0, is_refused=True)
        self.others += status != 500
        return Again(backoff_s(self.others + self.faults))

    def _is_tried_again(self, status: int, now: float, patience_s: float) -> bool:
        if self.unknown_at is not None:
            return now - self.unknown_at < _UNKNOWN_MODEL_S
        if status == 500:
            return self.faults < FAULTS
        return status in AGAIN and now - (self.first_at if self.first_at is not None else now) < patience_s
