"""Migrations under everything that may happen to a request meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.messages.work import TokenDelta
from dynamo_local.core.migration.protocol import (
    Action,
    Await,
    Cut,
    Finished,
    LogSeen,
    Migration,
    MigrationLimits,
    MigrationOutcome,
    MigrationPhase,
    Reserve,
    Warm,
    again_after_s,
)
from dynamo_local.core.request.log import RequestLog, Verdict

LIMITS = MigrationLimits(reserve_s=1, room_s=20, warm_s=5, poised_s=0.5, takeover_s=10, missing_tokens=3, rounds=3)
A, B, C = "a", "b", "c"


def seen(tokens: int = 30, *, epoch: int = 1, owner: str | None = A, live: bool = True) -> LogSeen:
    return LogSeen(epoch, owner, tokens, live)


def begun(tokens: int = 30) -> Migration:
    """A migration that has been promised room."""
    migration = Migration(seen(tokens), B, LIMITS)
    assert migration.advance(seen(tokens), 0.0) == Reserve(tokens, 20.0)
    return migration


def poised(tokens: int = 30) -> Migration:
    """One that awaits its last token at the source, since 0.0."""
    migration = begun(tokens)
    assert isinstance(migration.advance(seen(tokens), 0.0), Warm)
    assert migration.advance(seen(tokens), 0.0) == Await(0.5)
    assert migration.phase is MigrationPhase.POISED
    return migration


def cut(tokens: int = 30) -> Migration:
    migration = poised(tokens)
    assert migration.advance(seen(tokens + 1), 0.1) == Cut()
    return migration


MOVED = seen(31, epoch=2, owner=B)


# The way of a migration


def test_what_has_kv_is_warmed_then_what_has_come_and_the_cut_is_right_after_a_token() -> None:
    migration = begun(30)
    assert migration.advance(seen(30), 0.1) == Warm(29, 5.1)
    assert migration.advance(seen(45), 0.2) == Warm(44, 5.2)
    assert migration.advance(seen(47), 0.3) == Await(0.8)
    assert migration.phase is MigrationPhase.POISED
    assert migration.advance(seen(47), 0.4) == Await(0.8)
    assert migration.advance(seen(48), 0.5) == Cut()
    assert migration.advance(seen(48, epoch=2, owner=B), 0.6) == Await(10.5)
    assert migration.advance(seen(49, epoch=2, owner=B), 0.7) == Finished(
        MigrationOutcome.MIGRATED, "its first token has come", False
    )
    assert migration.warm_tokens == 44


def test_what_is_moved_cold_awaits_nothing() -> None:
    migration = Migration(seen(600), B, replace(LIMITS, rounds=0))
    migration.advance(seen(600), 0.0)
    assert migration.advance(seen(600), 0.1) == Await(0.6)
    assert migration.phase is MigrationPhase.POISED


def test_a_context_of_a_few_tokens_needs_no_warming() -> None:
    assert begun(3).advance(seen(3), 0.1) == Await(0.6)
    assert begun(4).advance(seen(4), 0.1) == Warm(3, 5.1)


def test_the_longer_the_context_the_fewer_tokens_are_left_for_the_gap() -> None:
    limits = replace(LIMITS, missing_tokens=8, missing_pairs=300)
    for tokens, left in ((20, 8), (37, 8), (50, 6), (100, 3), (200, 1)):
        for lacking in (left, left + 1):
            # The first warming is asked for without the last token.
            asked = tokens + 1 - lacking
            migration = Migration(seen(asked), B, limits)
            migration.advance(seen(asked), 0.0)
            assert isinstance(migration.advance(seen(asked), 0.0), Warm)
            assert isinstance(migration.advance(seen(tokens), 0.1), Warm) == (lacking > left), (tokens, lacking)


@given(st.integers(2, 20_000), st.lists(st.integers(0, 60), min_size=1, max_size=12))
def test_what_is_left_for_the_gap_is_bounded_where_rounds_gain_anything(tokens: int, come: list[int]) -> None:
    limits = MigrationLimits(rounds=len(come))
    migration = Migration(seen(tokens), B, limits)
    migration.advance(seen(tokens), 0.0)
    action, lacked = migration.advance(seen(tokens), 0.0), [tokens]
    while isinstance(action, Warm):
        tokens += come[migration.rounds - 1]
        lacked.append(tokens - action.tokens)
        action = migration.advance(seen(tokens), 0.0)
    assert migration.phase is MigrationPhase.POISED
    bounded = lacked[-1] <= limits.missing_tokens and lacked[-1] * tokens <= limits.missing_pairs
    assert bounded or migration.rounds == limits.rounds or lacked[-1] >= lacked[-2]


def test_a_source_that_is_faster_than_the_pull_is_cut_after_a_few_rounds() -> None:
    migration, tokens = begun(100), 100
    for come in (50, 40, 30):
        assert isinstance(migration.advance(seen(tokens), 0.0), Warm)
        tokens += come
    assert migration.advance(seen(tokens), 0.0) == Await(0.5)


def test_rounds_that_gain_nothing_are_left_out() -> None:
    migration = begun(100)
    assert isinstance(migration.advance(seen(100), 0.0), Warm)
    assert isinstance(migration.advance(seen(120), 0.0), Warm)
    assert migration.advance(seen(141), 0.0) == Await(0.5)


def test_a_source_that_brings_nothing_any_more_is_left_without_waiting_longer() -> None:
    assert poised().advance(seen(), 0.5) == Cut()


# What comes between


@pytest.mark.parametrize("step", [begun, poised])
def test_before_the_cut_a_request_that_is_over_or_lost_ends_the_migration(step: object) -> None:
    for what, outcome in (
        (seen(live=False), MigrationOutcome.ENDED),
        (seen(epoch=2, owner=C), MigrationOutcome.RECOVERED),
        (seen(owner=None), MigrationOutcome.RECOVERED),
    ):
        migration = begun() if step is begun else poised()
        over = migration.advance(what, 0.1)
        assert isinstance(over, Finished)
        assert (over.outcome, over.gives_back) == (outcome, True)


def test_a_refusal_leaves_the_request_where_it_is() -> None:
    assert begun().advance(seen(), 0.1, "no room") == Finished(MigrationOutcome.STAYED, "no room", True)
    migration = begun()
    migration.advance(seen(), 0.1)
    assert migration.advance(seen(), 0.2, "nothing lent") == Finished(MigrationOutcome.STAYED, "nothing lent", True)


def test_nothing_is_cut_over_to_a_destination_that_is_gone() -> None:
    for migration in (begun(), poised()):
        over = migration.advance(LogSeen(1, A, 31, live=True, destination_there=False), 0.1)
        assert over == Finished(MigrationOutcome.STAYED, "the destination is gone", True)
    # After the cut, its loss is told, and the request recovered.
    assert isinstance(cut().advance(LogSeen(2, B, 31, live=True, destination_there=False), 0.2), Await)


def test_an_answer_that_comes_too_late_does_not_count() -> None:
    over = begun().advance(seen(), 1.1)
    assert isinstance(over, Finished)
    assert over.outcome is MigrationOutcome.STAYED
    migration = begun()
    migration.advance(seen(), 0.0)
    over = migration.advance(seen(), 5.1)
    assert isinstance(over, Finished)
    assert over.outcome is MigrationOutcome.STAYED


def test_nothing_is_cut_when_the_room_is_kept_no_longer() -> None:
    over = poised().advance(seen(31), 20.0)
    assert isinstance(over, Finished)
    assert (over.outcome, over.gives_back) == (MigrationOutcome.STAYED, True)


def test_what_is_lost_after_the_cut_is_the_business_of_recovery() -> None:
    for what, outcome in (
        (seen(31, epoch=3, owner=C), MigrationOutcome.RECOVERED),
        (seen(31, epoch=2, owner=None), MigrationOutcome.RECOVERED),
        (seen(31, epoch=2, owner=B, live=False), MigrationOutcome.ENDED),
    ):
        over = cut().advance(what, 0.2)
        assert isinstance(over, Finished)
        assert (over.outcome, over.gives_back) == (outcome, True)


def test_a_first_token_that_is_the_last_one_counts() -> None:
    over = cut().advance(seen(32, epoch=2, owner=B, live=False), 0.2)
    assert isinstance(over, Finished)
    assert over.outcome is MigrationOutcome.MIGRATED


def test_a_destination_that_brings_nothing_is_waited_for_for_a_while() -> None:
    migration = cut()
    assert isinstance(migration.advance(MOVED, 10.0), Await)
    over = migration.advance(MOVED, 10.1)
    assert isinstance(over, Finished)
    assert over.outcome is MigrationOutcome.LATE


def test_what_is_over_stays_over() -> None:
    migration = begun()
    over = migration.advance(seen(), 0.1, "no room")
    assert migration.advance(seen(40), 0.2) == over


# Whatever happens


@dataclass
class World:
    """A request's log as a frontend has it, and the room that the destination keeps."""

    log: RequestLog = field(default_factory=lambda: RequestLog("r", [0] * 10))
    now: float = 0.0
    wanted: bool = True
    cuts: int = 0
    room_until: float = 0.0
    """0: no room is kept."""
    there: bool = True

    def __post_init__(self) -> None:
        self.log.assign(A)
        self.token()

    @property
    def seen(self) -> LogSeen:
        live = self.wanted and not self.log.finished
        return LogSeen(self.log.epoch, self.log.worker, 10 + self.log.position, live, self.there)

    def token(self, *, finish: bool = False) -> None:
        self.log.accept(TokenDelta("r", self.log.epoch, self.log.position, [1], finish="stop" if finish else None))

    def happen(self, what: str) -> None:
        self.now += 0.1
        happenings: dict[str, Callable[[], None]] = {
            "token": self.token,
            "tokens": self.tokens,
            "finish": lambda: self.token(finish=True),
            "cancel": self.cancel,
            "lost": self.lose,
            "recovered": self.recover,
            "gone": self.lose_destination,
            "time": self.pass_time,
        }
        happenings.get(what, lambda: None)()

    def tokens(self) -> None:
        for _ in range(9):
            self.token()

    def cancel(self) -> None:
        self.wanted = False

    def lose(self) -> None:
        self.log.give_up(self.log.epoch)

    def recover(self) -> None:
        self.lose()
        self.log.assign(C)

    def lose_destination(self) -> None:
        self.there = False
        if self.log.worker == B:
            self.lose()

    def pass_time(self) -> None:
        self.now += 3.0

    def do(self, action: Action) -> None:
        match action:
            case Reserve():
                self.room_until = action.until
            case Cut():
                self.cuts += 1
                assert self.log.worker == A, "only the source is cut"
                assert self.wanted
                assert self.there
                assert not self.log.finished
                assert self.now < self.room_until
                old = self.log.current
                self.log.assign(B)
                stale = TokenDelta("r", old.epoch, self.log.position, [1])
                assert self.log.accept(stale)[0] is Verdict.STALE
            case Finished(gives_back=True):
                self.room_until = 0.0


events = st.lists(
    st.tuples(
        st.sampled_from(["token", "tokens", "finish", "cancel", "lost", "recovered", "gone", "time", "nothing"]),
        st.sampled_from([None, None, None, "refused"]),
    ),
    max_size=25,
)


@given(events)
def test_a_move_cuts_once_at_most_and_ends_and_gives_its_room_back(script: list[tuple[str, str | None]]) -> None:
    world = World()
    migration = Migration(world.seen, B, LIMITS)
    action = migration.advance(world.seen, world.now)
    world.do(action)
    for what, refused in script:
        world.happen(what)
        answered, on = isinstance(action, Reserve | Warm), migration.is_on(world.seen)
        action = migration.advance(world.seen, world.now, refused if answered else None)
        assert on or isinstance(action, Finished)
        world.do(action)
    for _ in range(60):
        # From here on, only time passes.
        if isinstance(action, Finished):
            break
        world.now += 1.0
        action = migration.advance(world.seen, world.now)
        world.do(action)
    assert isinstance(action, Finished), "it ends"
    assert world.cuts <= 1
    assert (action.outcome is MigrationOutcome.MIGRATED) <= (world.cuts == 1)
    # The request has arrived there, or nothing is kept for it.
    assert world.room_until == 0.0 or action.outcome is MigrationOutcome.MIGRATED


@given(st.integers(1, 500), st.integers(1, 40))
def test_warming_never_asks_for_what_has_no_kv(tokens: int, missing: int) -> None:
    migration = Migration(seen(tokens), B, MigrationLimits(missing_tokens=missing))
    migration.advance(seen(tokens), 0.0)
    action = migration.advance(seen(tokens), 0.0)
    if isinstance(action, Warm):
        assert 0 < action.tokens < tokens
    else:
        assert tokens <= missing


def test_what_does_not_come_about_is_tried_again_less_and_less_often() -> None:
    waits = [again_after_s(stayed) for stayed in range(6)]
    assert waits == [0.5, 0.5, 1.0, 2.0, 4.0, 4.0]
    assert again_after_s(10_000) == 4.0
