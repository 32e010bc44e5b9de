"""When a task whose answer is no result is tried again."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from components.frontend.http.own_requests import AGAIN, FAULTS, Answered, backoff_s
from dynamo_local.core.async_tasks.records import Call

_UNKNOWN_MODEL_S = 120.0
"""Time for which the model of a task may be unknown: after a restart, endpoints come one by one."""

_UNKNOWN, _CLOSED, _REFUSED = 404, frozenset({404, 503}), 429


class Outcome(Enum):
    """What an answer to a task tells of the others of its line.

    `ANSWERED`: there is room. `REFUSED`: this one is over a limit (429), which another one, of fewer tokens or choices
    or of a higher priority, need not be. `CLOSED`: all would be refused, as there is no worker (503) or no model (404).
    """

    ANSWERED = auto()
    REFUSED = auto()
    CLOSED = auto()
    OTHER = auto()


def outcome_of(answer: Answered) -> Outcome:
    """Return what an answer tells, whether it is the task's result or not."""
    if answer.is_final:
        return Outcome.OTHER
    if answer.status in _CLOSED:
        return Outcome.CLOSED
    if answer.status == _REFUSED:
        return Outcome.REFUSED
    return Outcome.OTHER if answer.status == 500 or answer.status in AGAIN else Outcome.ANSWERED


@dataclass
class Tries:
    """What has come of a task in this frontend that is no result. Times are CLOCK_MONOTONIC, in s. `first_at`: since
    when it is tried, and no other of its line has had a result.

    It is not on the disk: a restart, and another frontend, begin anew. That gives a task more time, and never less.
    """

    first_at: float | None = None
    unknown_at: float | None = None
    faults: int = 0
    others: int = 0
    """Answers that were neither faults nor refusals."""
    unwritten: Call | None = None
    """A call of the receiver that could not be recorded: it is not to be made again for that."""

    def begin(self, now: float) -> None:
        """Note that the task is tried now."""
        if self.first_at is None:
            self.first_at = now

    def note_room(self, answered_at: float) -> None:
        """Note when another task of the line had its result: until then, this one waited for its turn alone."""
        if self.first_at is not None:
            self.first_at = max(self.first_at, answered_at)
        if self.unknown_at is not None and answered_at > self.unknown_at:
            self.unknown_at = None

    def note(self, answer: Answered, now: float, patience_s: float) -> float | None:
        """Note an answer. Returns after how many seconds the task may be tried again; None: the answer is the result.

        0 for a refusal: it is for the line of its owner to wait.
        """
        status = answer.status
        self.unknown_at = None if status != _UNKNOWN else self.unknown_at if self.unknown_at is not None else now
        self.faults += status == 500
        if answer.is_final or not self._is_tried_again(status, now, patience_s):
            return None
        if status == _REFUSED or status in _CLOSED:
            return 0.0
        self.others += status != 500
        return backoff_s(self.others + self.faults)

    def _is_tried_again(self, status: int, now: float, patience_s: float) -> bool:
        if self.unknown_at is not None:
            return now - self.unknown_at < _UNKNOWN_MODEL_S
        if status == 500:
            return self.faults < FAULTS
        return status in AGAIN and now - (self.first_at if self.first_at is not None else now) < patience_s
