"""The protocol of a migration: a running request goes to another worker together with its KV, while its tokens keep
coming. Pure.

    reserving   the destination is asked to reserve room
    warming     the destination pulls or computes the KV that there is, and then that of the tokens added meanwhile
    poised      the destination lacks the KV of a few tokens only: the cut follows the next token, so that the gap is
                short
    cut         the request is the destination's, under the next epoch; the source is told to stop
    over        the first token of the destination has arrived, or the migration has ended otherwise

The request is its source's until the cut: whatever goes wrong before leaves it there. After the cut it is a request
like any other, and what goes wrong is left to recovery. A migration is of one epoch of one request, and ends when that
epoch ends for any other reason than the migration's own cut.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from dynamo_local.core.fleet.freeness import Usage
from dynamo_local.core.messages.presence import EndedMigrations, MigrationCounts, Presence


class MigrationPhase(StrEnum):
    """The states of a migration, in order."""

    RESERVING = "reserving"
    WARMING = "warming"
    POISED = "poised"
    CUT = "cut"
    OVER = "over"


class MigrationOutcome(StrEnum):
    """How a migration has ended. The words are labels of metrics."""

    MIGRATED = "migrated"
    """The destination has sent a token."""
    STAYED = "stayed"
    """The request is still at its source."""
    ENDED = "ended"
    """The request has finished or was cancelled."""
    RECOVERED = "recovered"
    """The source or, after the cut, the destination was lost: recovery has given the request a new epoch."""
    LATE = "late"
    """No token has come for long after the cut. Recovery looks after the request."""


REASONS = ("drain", "role", "hand", "rebalance", "room", "thrash", "trial")
"""Why migrations begin. The words are labels of metrics."""


@dataclass(frozen=True)
class MigrationLimits:
    """Deadlines of a migration, in seconds, and how much of the KV may be left to compute in the gap."""

    reserve_s: float = 1.0
    """Until the destination has answered whether it has room."""
    room_s: float = 30.0
    """How long the destination keeps the room. There is no cut after that."""
    warm_s: float = 10.0
    """Until one `Warm` is answered. The destination waits for steps of both engines, and for the KV to be read."""
    poised_s: float = 0.25
    """How long to wait for a token of the source to cut after. If none comes, the cut follows without."""
    takeover_s: float = 30.0
    """Until the first token after the cut."""
    missing_tokens: int = 8
    """The destination is warm enough if it lacks the KV of no more tokens than these. (It always lacks that of the last
    one.) One more round takes about three steps, and makes one step longer for the other streams."""
    missing_pairs: int = 1 << 16
    """The tokens that are missing at the cut attend to the whole context, in the step that the client waits for. So
    their number times the length of the context must not exceed this."""
    rounds: int = 4
    """Number of `Warm`s at most: a source may generate faster than the destination catches up."""


@dataclass(frozen=True)
class LogSeen:
    """A request's log at one moment, and its migration's destination.

    `tokens`: length of the prompt and of all accepted tokens; `owner`: lease of the current epoch's worker; `live`:
    more tokens are wanted; `destination_there`: the destination is in the fleet, and takes requests.
    """

    epoch: int
    owner: str | None
    tokens: int
    live: bool
    destination_there: bool = True


@dataclass(frozen=True)
class Reserve:
    """Ask the destination to keep room for so many tokens, until a time (CLOCK_MONOTONIC, s)."""

    tokens: int
    until: float


@dataclass(frozen=True)
class Warm:
    """Have the destination get the KV of the first `tokens` tokens, before `until` (CLOCK_MONOTONIC, s)."""

    tokens: int
    until: float


@dataclass(frozen=True)
class Await:
    """Call `advance` again when the log has changed, or at this time (CLOCK_MONOTONIC, s)."""

    until: float


@dataclass(frozen=True)
class Cut:
    """Mint the next epoch for the destination, submit all tokens to it, and tell the source to stop, now."""


@dataclass(frozen=True)
class Finished:
    """Nothing more is to be done, but to cancel the reservation if `gives_back`."""

    outcome: MigrationOutcome
    why: str
    gives_back: bool


Action = Reserve | Warm | Await | Cut | Finished


class Migration:
    """The state machine of a request's migration. Call `advance` again and again: each call returns the next action,
    and is told what has become of the last one.

    Invariants: there is at most one `Cut`, and only while the migration's epoch is current and its owner is the source;
    `advance` returns `Finished` in the end, whatever is seen, if time passes; room that may have been reserved is given
    back, unless the destination has sent a token.
    """

    def __init__(self, seen: LogSeen, destination: str, limits: MigrationLimits | None = None) -> None:
        self._source = seen.owner
        self._epoch = seen.epoch
        self._destination = destination
        self._limits = limits or MigrationLimits()
        self.phase = MigrationPhase.RESERVING
        self.warm_tokens = 0
        """Number of leading tokens whose KV the destination has."""
        self.rounds = 0
        self._lacking = math.inf
        """Number of tokens whose KV the destination lacked before the last `Warm`."""
        self._asked = False
        """Whether room was asked for."""
        self._asked_tokens = 0
        self._deadline = 0.0
        """When the wait of this phase ends."""
        self._room_until = 0.0
        self._tokens = 0
        """Length of the context when this phase began."""
        self._over: Finished | None = None

    def advance(self, seen: LogSeen, now: float, refused: str | None = None) -> Action:
        """Return the next action. `refused`: why the last `Reserve` or `Warm` was not carried out; a missing answer is
        a refusal, too."""
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
        """Return whether the migration goes on, as far as the log tells. Otherwise no answer needs to be waited for."""
        return self._over is None and self._outcome(seen) is None

    def _outcome(self, seen: LogSeen) -> tuple[MigrationOutcome, str] | None:
        """Return how the migration has ended, and why, if the log or the fleet shows that; otherwise None."""
        cut = self.phase is MigrationPhase.CUT
        epoch, owner = (self._epoch + 1, self._destination) if cut else (self._epoch, self._source)
        if cut and seen.epoch == epoch and seen.tokens > self._tokens:
            return MigrationOutcome.MIGRATED, "its first token has come"
        if not seen.live:
            return MigrationOutcome.ENDED, "the request is over"
        # The request may have lost its worker between the decision to migrate it and the migration's beginning.
        if seen.epoch != epoch or seen.owner is None or seen.owner != owner:
            return MigrationOutcome.RECOVERED, "a worker was lost"
        if not cut and not seen.destination_there:
            # A destination that has left the fleet already would not be missed again, and the request would belong to
            # no worker. A destination that drains would refuse the request.
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
        # If the source is as fast as the destination, one more round gains nothing.
        if self.rounds >= self._limits.rounds or lacking <= self._missing_allowed(seen) or lacking >= before:
            self._enter(MigrationPhase.POISED, seen, now + self._limits.poised_s)
            return Await(self._deadline)
        self.rounds += 1
        self._asked_tokens = seen.tokens - 1
        self._enter(MigrationPhase.WARMING, seen, now + self._limits.warm_s)
        return Warm(self._asked_tokens, self._deadline)

    def _missing_allowed(self, seen: LogSeen) -> int:
        """Return the number of tokens that the destination may lack at the cut."""
        return min(self._limits.missing_tokens, self._limits.missing_pairs // seen.tokens)

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
        # A migrated request uses the room; room that was not asked for needs not be given back.
        self._over = Finished(outcome, why, gives_back=self._asked and outcome is not MigrationOutcome.MIGRATED)
        self.phase = MigrationPhase.OVER
        return self._over


def again_after_s(stayed: int) -> float:
    """Return the seconds until a request may migrate again, after so many migrations in a row that left it where it
    was: half a second, then twice as long each time, to 4 s."""
    return math.ldexp(0.5, min(max(stayed - 1, 0), 3))


# The effect of a frontend's migrations on the loads of workers, until the workers' own reports show it. Pure.
#
# A worker's reported load is a little old, and a migration takes a while. So a migrating request counts as load of its
# destination, and no more of its source, from the migration's begin until both workers have reported a load that they
# measured after its end.

FORGOTTEN_S = 10.0
"""A migration that ended so long ago is in every reported load: an older load is not used."""


@dataclass
class InFlightMigration:
    """A migration under way. `source` and `destination` are leases, `tokens` is the length of its context."""

    source: str
    destination: str
    tokens: int
    ended_at: float | None = None


class InFlightMigrations:
    """All migrations in progress, and those that have just ended. Times are CLOCK_MONOTONIC, in seconds."""

    def __init__(self) -> None:
        self._migrations: list[InFlightMigration] = []

    @property
    def in_progress(self) -> int:
        """Number of migrations that have not ended."""
        return sum(each.ended_at is None for each in self._migrations)

    def leaving(self, worker: str) -> int:
        """Return the number of migrations in progress from this worker."""
        return sum(each.ended_at is None and each.source == worker for each in self._migrations)

    def begin(self, source: str, destination: str, tokens: int, now: float) -> InFlightMigration:
        """Note that a migration begins."""
        self._migrations = [
            each for each in self._migrations if each.ended_at is None or now - each.ended_at < FORGOTTEN_S
        ]
        migration = InFlightMigration(source, destination, tokens)
        self._migrations.append(migration)
        return migration

    def end(self, migration: InFlightMigration, now: float, *, moved: bool) -> None:
        """Note that the migration has ended. `moved`: the request was cut over to the destination."""
        if moved:
            migration.ended_at = now
        else:
            self._migrations.remove(migration)

    def change(self, worker: Presence) -> Usage:
        """Return what is to be added to the load that a worker has reported; negative for what leaves the worker."""
        measured_at = -math.inf if worker.load is None or worker.load.at is None else worker.load.at
        unreported = [each for each in self._migrations if each.ended_at is None or each.ended_at >= measured_at]
        coming = _sum(each for each in unreported if each.destination == worker.lease)
        going = _sum(each for each in unreported if each.source == worker.lease)
        return Usage(coming[0] - going[0], requests=coming[1] - going[1])


def _sum(migrations: Iterable[InFlightMigration]) -> tuple[int, int]:
    """Return the tokens and the number of these migrations' requests."""
    tokens = [migration.tokens for migration in migrations]
    return sum(tokens), len(tokens)


# The migrations of all frontends together. Pure.


def migrations_of(members: Iterable[Presence]) -> MigrationCounts | None:
    """Return the sum of what the frontends among the members have counted, as `migrations_together`."""
    return migrations_together(presence.counts.migrations for presence in members if presence.counts is not None)


def migrations_together(reported: Iterable[MigrationCounts | None]) -> MigrationCounts | None:
    """Return the sum of what was counted; None if nothing has been. The gap is the longest of the last gaps."""
    known = [counts for counts in reported if counts is not None]
    if not known:
        return None
    ended: Counter[tuple[str, str]] = Counter()
    for counts in known:
        for each in counts.ended:
            ended[each.reason, each.outcome] += each.number
    longest = max(known, key=lambda counts: counts.gap_s or 0.0)
    return MigrationCounts(
        tuple(EndedMigrations(*name, number) for name, number in sorted(ended.items())),
        sum(counts.pulled_bytes for counts in known),
        longest.gap_s,
        longest.gap_steps,
    )
