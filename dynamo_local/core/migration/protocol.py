"""A move: a running request goes to another worker together with its KV, while its tokens keep coming. Pure.

    reserving   the destination is asked for room
    warming     the destination pulls and computes what KV there is, and again what has come meanwhile
    poised      it has all but the last few tokens: cut right after the next one, so that the gap is short
    cut         the request is the destination's, under the next epoch; the source is told to stop
    over        its first token there has come, or the move has ended in another way

The request is its source's until the cut: whatever goes wrong before leaves it there. After the cut it is a request
like any other, and what goes wrong is the business of ordinary recovery. The fence is the epoch: a move is of one
epoch of one request, and ends when that is over for any other reason than its own cut.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum


class MigrationPhase(StrEnum):
    """How far a move has come."""

    RESERVING = "reserving"
    WARMING = "warming"
    POISED = "poised"
    CUT = "cut"
    OVER = "over"


class MigrationOutcome(StrEnum):
    """How a move has ended: one word each, fit to be counted by."""

    MOVED = "moved"
    """The destination has brought a token."""
    STAYED = "stayed"
    """Nothing was changed: the request is where it was."""
    ENDED = "ended"
    """The request has ended meanwhile, or nobody wants it any more."""
    RECOVERED = "recovered"
    """Its worker, or the one that it was to go to, was lost meanwhile: it goes on under an epoch of its own."""
    LATE = "late"
    """Cut, and no token has come for a long time. Ordinary recovery looks after it."""


REASONS = ("drain", "role", "hand", "rebalance", "room", "trial")
"""Why moves begin, as they are counted."""


@dataclass(frozen=True)
class MigrationLimits:
    """How long a move waits for what, in seconds, and how much it leaves for the gap."""

    reserve_s: float = 1.0
    """For the destination to answer whether it has room."""
    room_s: float = 30.0
    """How long the room is kept. A move that has not cut by then does not."""
    warm_s: float = 10.0
    """For one warm request: it waits for steps on either side, and for the KV to be read."""
    poised_s: float = 0.25
    """For one more token of the source, to cut after. One that brings none any more is left at once."""
    takeover_s: float = 30.0
    """For the first token after the cut."""
    tail: int = 8
    """The destination is warm enough if it lacks the KV of no more tokens, the last one of which is nowhere: one more
    round takes about three steps, and each makes one step longer for the streams beside;"""
    tail_pairs: int = 1 << 16
    """but only if these, each compared with the whole context, make no more pairs of tokens: they are computed in the
    step that the client waits for."""
    rounds: int = 4
    """Warm requests at most: a source may be faster than the destination."""


@dataclass(frozen=True)
class LogSeen:
    """The request's log at one moment. `tokens`: prompt and all accepted; `owner`: lease of the current epoch's worker;
    `live`: more tokens are wanted; `destination_there`: nobody has missed it yet, and it takes requests."""

    epoch: int
    owner: str | None
    tokens: int
    live: bool
    destination_there: bool = True


@dataclass(frozen=True)
class Reserve:
    """Ask the destination to keep room for so many tokens until then."""

    tokens: int
    until: float


@dataclass(frozen=True)
class Warm:
    """Have the destination get the KV of the first `tokens` tokens, before `until`."""

    tokens: int
    until: float


@dataclass(frozen=True)
class Await:
    """Look again when the log has changed, or then."""

    until: float


@dataclass(frozen=True)
class Cut:
    """Mint the next epoch for the destination, submit all tokens to it, and tell the source to stop, now."""


@dataclass(frozen=True)
class Finished:
    """Nothing more is to be done, but to give the room back if `gives_back`."""

    outcome: MigrationOutcome
    why: str
    gives_back: bool


Action = Reserve | Warm | Await | Cut | Finished


class Migration:
    """One move of one request. Call `advance` first with nothing, then with what has become of its last action.

    Invariants: at most one `Cut`, and only while the epoch that the move is of is current and its owner is the source;
    `advance` gives `Over` in the end, whatever is seen, if time passes; room that may have been reserved is given back,
    unless the request has arrived there.
    """

    def __init__(self, seen: LogSeen, destination: str, limits: MigrationLimits | None = None) -> None:
        self._source = seen.owner
        self._epoch = seen.epoch
        self._destination = destination
        self._limits = limits or MigrationLimits()
        self.phase = MigrationPhase.RESERVING
        self.warm_tokens = 0
        """The destination has the KV of so many."""
        self.rounds = 0
        self._lacking = math.inf
        """Tokens that it lacked before the last warm request."""
        self._asked = False
        self._asked_tokens = 0
        self._deadline = 0.0
        """Of what is under way in this phase."""
        self._room_until = 0.0
        self._tokens = 0
        """Seen when the present phase began."""
        self._over: Finished | None = None

    def advance(self, seen: LogSeen, now: float, refused: str | None = None) -> Action:
        """What to do next. `refused`: why the last `Reserve` or `Warm` was not done; an answer that has not come is a
        refusal, too."""
        if self._over is not None:
            return self._over
        if (outcome := self._outcome(seen)) is not None:
            return self._end(*outcome)
        match self.phase:
            case MigrationPhase.RESERVING:
                return self._reserve(seen, now, refused)
            case MigrationPhase.WARMING:
                return self._warmed(seen, now, refused)
            case MigrationPhase.POISED:
                return self._poised(seen, now)
            case _:
                return self._await_token(now)

    def is_on(self, seen: LogSeen) -> bool:
        """Whether nothing seen ends the move: otherwise what is under way for it needs not be waited for."""
        return self._over is None and self._outcome(seen) is None

    def _outcome(self, seen: LogSeen) -> tuple[MigrationOutcome, str] | None:
        """How the log alone says that the move is over."""
        cut = self.phase is MigrationPhase.CUT
        epoch, owner = (self._epoch + 1, self._destination) if cut else (self._epoch, self._source)
        if cut and seen.epoch == epoch and seen.tokens > self._tokens:
            return MigrationOutcome.MOVED, "its first token has come"
        if not seen.live:
            return MigrationOutcome.ENDED, "the request is over"
        # It may have lost its worker between the decision to move it and the move's beginning.
        if seen.epoch != epoch or seen.owner is None or seen.owner != owner:
            return MigrationOutcome.RECOVERED, "a worker was lost"
        if not cut and not seen.destination_there:
            # Once it is missed, nobody would miss it again: the request would be nobody's. And one that is about to
            # go would refuse it.
            return MigrationOutcome.STAYED, "the destination is gone"
        return None

    def _reserve(self, seen: LogSeen, now: float, refused: str | None) -> Action:
        if not self._asked:
            self._asked = True
            self._deadline = now + self._limits.reserve_s
            self._room_until = now + self._limits.room_s
            return Reserve(seen.tokens, self._room_until)
        if refused is not None:
            return self._end(MigrationOutcome.STAYED, refused)
        if now > self._deadline:
            return self._end(MigrationOutcome.STAYED, "the destination's answer came too late")
        return self._warm_or_wait(seen, now)

    def _warmed(self, seen: LogSeen, now: float, refused: str | None) -> Action:
        if refused is not None:
            return self._end(MigrationOutcome.STAYED, refused)
        if now > self._deadline:
            return self._end(MigrationOutcome.STAYED, "warming the destination took too long")
        self.warm_tokens = self._asked_tokens
        return self._warm_or_wait(seen, now)

    def _warm_or_wait(self, seen: LogSeen, now: float) -> Action:
        lacking, before = seen.tokens - self.warm_tokens, self._lacking
        self._lacking = lacking
        # A source that is as fast as the destination leaves nothing to be gained.
        if self.rounds >= self._limits.rounds or lacking <= self._tail(seen) or lacking >= before:
            self._enter(MigrationPhase.POISED, seen, now + self._limits.poised_s)
            return Await(self._deadline)
        self.rounds += 1
        self._asked_tokens = seen.tokens - 1
        self._enter(MigrationPhase.WARMING, seen, now + self._limits.warm_s)
        return Warm(self._asked_tokens, self._deadline)

    def _tail(self, seen: LogSeen) -> int:
        """How many tokens may be left for the gap."""
        return min(self._limits.tail, self._limits.tail_pairs // seen.tokens)

    def _poised(self, seen: LogSeen, now: float) -> Action:
        if now >= self._room_until:
            return self._end(MigrationOutcome.STAYED, "the destination keeps the room no longer")
        if seen.tokens == self._tokens and now < self._deadline:
            return Await(self._deadline)
        self._enter(MigrationPhase.CUT, seen, now + self._limits.takeover_s)
        return Cut()

    def _await_token(self, now: float) -> Action:
        if now >= self._deadline:
            return self._end(MigrationOutcome.LATE, "no token has come from the destination")
        return Await(self._deadline)

    def _enter(self, phase: MigrationPhase, seen: LogSeen, deadline: float) -> None:
        self.phase = phase
        self._tokens = seen.tokens
        self._deadline = deadline

    def _end(self, outcome: MigrationOutcome, why: str) -> Finished:
        # What is moved has taken its room; what was never asked for needs not be given back.
        self._over = Finished(outcome, why, gives_back=self._asked and outcome is not MigrationOutcome.MOVED)
        self.phase = MigrationPhase.OVER
        return self._over


def again_after_s(stayed: int) -> float:
    """How long a request whose worker goes waits for its next move, after so many in a row that did not come about:
    half a second, then twice as long each time, to 4 s."""
    return math.ldexp(0.5, min(max(stayed - 1, 0), 3))
