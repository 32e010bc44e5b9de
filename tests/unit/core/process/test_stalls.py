"""A starved engine is not taken for a hung one. An engine counts as hung after the limit of time in which it could have
made a step."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.process.stalls import StallClock, Verdict

LIMIT_S = 10.0
LOOK_S = 1.0


def clock() -> StallClock:
    return StallClock(LIMIT_S, longest_look_s=2 * LOOK_S)


def test_an_engine_that_waits_for_nothing_hangs_after_the_limit() -> None:
    stalls = clock()
    verdicts = [stalls.look(100.0 + second, 100.0, 7.0) for second in range(1, 12)]
    assert verdicts == [Verdict.WELL] * 10 + [Verdict.HUNG]


def test_an_engine_that_waits_for_a_core_is_starved_however_long() -> None:
    stalls = clock()
    verdicts = [stalls.look(100.0 + second, 100.0, 0.95 * second) for second in range(1, 1000)]
    assert set(verdicts[1:]) == {Verdict.STARVED}


def test_what_was_waited_before_the_last_step_excuses_nothing() -> None:
    stalls = clock()
    stalls.look(50.0, 49.0, 0.0)
    verdicts = [stalls.look(100.0 + second, 100.0, 40.0) for second in range(1, 12)]
    assert verdicts[-1] is Verdict.HUNG


def test_a_step_begins_it_anew() -> None:
    stalls = clock()
    for second in range(1, 10):
        stalls.look(100.0 + second, 100.0, 0.0)
    assert stalls.look(111.0, 110.5, 0.0) is Verdict.WELL


def test_who_looks_late_does_not_hold_it_against_the_engine() -> None:
    stalls = clock()
    stalls.look(101.0, 100.0, 0.0)
    assert stalls.look(1000.0, 100.0, 0.0) is Verdict.WELL


@given(st.lists(st.tuples(st.floats(0.5, 2.0), st.floats(0.0, 3.0)), min_size=1, max_size=100))
def test_only_time_in_which_it_could_run_counts(looks: list[tuple[float, float]]) -> None:
    stalls, now, waited_s, able_s, starved_at = clock(), 100.0, 0.0, 0.0, 0.0
    for number, (seconds, share) in enumerate(looks):
        now += seconds
        waited_s += share * seconds
        starved_at = now if number and share >= 0.499 else starved_at
        verdict = stalls.look(now, 100.0, waited_s)
        if verdict is not Verdict.STARVED:
            able_s += seconds
        assert (verdict is Verdict.HUNG) <= (able_s > LIMIT_S)
        assert (verdict is Verdict.STARVED) <= (now - starved_at <= 3.0)
        if verdict is Verdict.HUNG:
            return


def test_an_engine_that_had_a_core_for_a_moment_is_starved_still() -> None:
    stalls, waited_s = clock(), 0.0
    for second in range(1, 200):
        waited_s += 0.0 if second % 4 == 0 else 0.95
        assert stalls.look(100.0 + second, 100.0, waited_s) in ((Verdict.WELL,) if second == 1 else (Verdict.STARVED,))
