"""Judges the answer of a request, delta by delta, against its right answer. Pure."""

from __future__ import annotations

import enum
import re
import struct
from dataclasses import dataclass, field

from dynamo_local.core.messages.work import TokenDelta
from tests.chaos.tasks import Task


class Outcome(enum.Enum):
    """The end of a request. The last three are failures of the run."""

    RIGHT = "right tokens, once"
    LEFT = "client left, right so far"
    REFUSED = "invalid, refused"
    STATE_LOST = "state lost, said so"
    ENGINES_DIED = "engines died under it, said so"
    WRONG = "WRONG TOKENS"
    ERROR = "ERROR"
    FORGOTTEN = "FORGOTTEN"


FAILURES = frozenset({Outcome.WRONG, Outcome.ERROR, Outcome.FORGOTTEN})

REFUSAL = "max_tokens must be at least 1"
STATE_LOST = "the worker that generated the answer was lost"
"""Beginnings of documented error messages to clients."""

_ENGINES_DIED = re.compile(r"(\d+) engines died while they worked on this request")


def engines_died(reason: str) -> int | None:
    """Return the number of dead engines that an error message blames on a request; None for other messages."""
    said = _ENGINES_DIED.search(reason)
    return None if said is None else int(said[1])


@dataclass
class Answer:
    """The answer to a request so far. Times are CLOCK_MONOTONIC."""

    task: Task
    asked_at: float
    news_at: float = field(init=False)
    longest_silence_s: float = 0.0
    received: int = 0
    deaths: int = 0
    """Number of engines that were killed while they worked on the request."""
    outcome: Outcome | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        self.news_at = self.asked_at

    def take(self, delta: TokenDelta, now: float) -> None:
        """Judge a delta. Sets the outcome if the delta is wrong or the last one."""
        self.longest_silence_s = max(self.longest_silence_s, now - self.news_at)
        self.news_at = now
        if self.outcome is not None:
            self._wrong(f"more came after the end ({self.outcome.value}): {delta}")
        elif delta.finish == "error":
            self._judge_error(delta.error or "")
        else:
            self._judge_tokens(delta)

    def __str__(self) -> str:
        task = self.task
        return f"{task.request_id}, {self.received} of {task.max_tokens} tokens, prompt {len(task.prompt)}"

    def end(self, outcome: Outcome, reason: str = "") -> None:
        self.outcome, self.reason = outcome, reason

    def _judge_error(self, reason: str) -> None:
        if not self.task.valid and reason.startswith(REFUSAL):
            self.end(Outcome.REFUSED)
        elif not self.task.survives and self.received and reason.startswith(STATE_LOST):
            self.end(Outcome.STATE_LOST)
        elif (died := engines_died(reason)) is not None and died <= self.deaths:
            self.end(Outcome.ENGINES_DIED)
        else:
            self.end(Outcome.ERROR, reason)

    def _judge_tokens(self, delta: TokenDelta) -> None:
        mistake = self._mistake(delta)
        if mistake is not None:
            self._wrong(mistake)
            return
        self.received += len(delta.token_ids)
        if delta.finish is not None:
            self.end(Outcome.RIGHT)

    def _mistake(self, delta: TokenDelta) -> str | None:
        """Return what is wrong with the next tokens; None if they are right."""
        task, start, end = self.task, self.received, self.received + len(delta.token_ids)
        if not task.valid:
            return "an answer to an invalid request"
        if delta.position != start:
            return f"position {delta.position} came where {start} was to come"
        wanted = task.answer[start:end]
        if delta.token_ids != wanted:
            return f"from position {start} on: {delta.token_ids}, not {wanted}"
        if task.logprobs is not None and chosen(delta) != delta.token_ids:
            return f"log-probabilities of {chosen(delta)} with tokens {delta.token_ids}"
        if delta.finish != (task.finish if end == len(task.answer) else None):
            return f"finish {delta.finish} after {end} of {len(task.answer)} tokens"
        return None

    def _wrong(self, reason: str) -> None:
        self.end(Outcome.WRONG, reason)


def chosen(delta: TokenDelta) -> list[int]:
    """Return the chosen tokens in a delta's log-probabilities: the first of each row."""
    if delta.logprobs is None:
        return []
    ids = delta.logprobs.token_ids
    rows, width = ids.shape
    values = struct.unpack(f"<{rows * width}{'q' if ids.dtype == 'int64' else 'i'}", ids.data)
    return list(values[::width])
