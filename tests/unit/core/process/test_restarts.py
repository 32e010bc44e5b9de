from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.errors import UsageError
from dynamo_local.core.process.restarts import (
    USAGE_EXIT_CODE,
    CircusLimits,
    CircusRecord,
    GiveUp,
    LifeRecord,
    Restart,
    RestartLimits,
    became_ready,
    circusd_died,
    died,
)

LIMITS = RestartLimits(first_delay_s=0.5, max_delay_s=30, healthy_after_s=60, max_failed_starts=3)
SERVED = LifeRecord(ever_ready=True)


def delays(record: LifeRecord, deaths: int) -> list[float]:
    found = []
    for _ in range(deaths):
        decision, record = died(record, 1, LIMITS, 100.0)
        assert isinstance(decision, Restart)
        assert decision.at == 100.0 + decision.delay_s
        found.append(decision.delay_s)
    return found


def test_delays_double_up_to_the_longest() -> None:
    assert delays(SERVED, 9) == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]


@given(st.integers(1, 10_000))
def test_no_number_of_deaths_exceeds_the_longest_delay_or_ends_a_service_that_has_served(deaths: int) -> None:
    decision, _ = died(replace(SERVED, deaths=deaths), -9, LIMITS, 0.0)
    assert isinstance(decision, Restart)
    assert LIMITS.first_delay_s <= decision.delay_s <= LIMITS.max_delay_s


@given(st.floats(0, 200))
def test_deaths_are_forgotten_after_a_healthy_while_and_only_then(lived_s: float) -> None:
    record = became_ready(replace(SERVED, deaths=5), 1000.0)
    decision, after = died(record, 1, LIMITS, 1000.0 + lived_s)
    assert after.deaths == (1 if lived_s >= LIMITS.healthy_after_s else 6)
    assert isinstance(decision, Restart)


def test_saying_again_that_it_is_ready_does_not_make_a_process_younger() -> None:
    record = became_ready(became_ready(LifeRecord(), 10.0), 60.0)
    assert died(record, 1, LIMITS, 71.0)[1].deaths == 1
    assert record.ready_since == 10.0


def test_a_wrong_configuration_is_final_before_the_service_was_ever_ready() -> None:
    decision, _ = died(LifeRecord(), USAGE_EXIT_CODE, LIMITS, 0.0)
    assert decision == GiveUp("did not start")
    decision, _ = died(SERVED, USAGE_EXIT_CODE, LIMITS, 0.0)
    assert isinstance(decision, Restart)


def test_a_service_that_never_was_ready_is_given_up_after_a_few_starts() -> None:
    record = LifeRecord()
    first, record = died(record, 1, LIMITS, 0.0)
    second, record = died(record, None, LIMITS, 1.0)
    third, _ = died(record, -11, LIMITS, 2.0)
    assert isinstance(first, Restart)
    assert isinstance(second, Restart)
    assert third == GiveUp("failed to start 3 times")


def test_the_exit_code_of_a_usage_error_is_the_one_that_is_final() -> None:
    assert UsageError.exit_code == USAGE_EXIT_CODE


def test_circusd_is_started_again_at_once_then_later_and_later() -> None:
    limits = CircusLimits(within_s=60, first_delay_s=0.5, max_delay_s=1)
    record = CircusRecord()
    delays_s = []
    for now in (0.0, 10.0, 20.0, 30.0, 85.0, 200.0):
        decision, record = circusd_died(record, True, limits, now)
        assert isinstance(decision, Restart)
        assert decision.at == now + decision.delay_s
        delays_s.append(decision.delay_s)
    assert delays_s == [0, 0.5, 1, 1, 0.5, 0]


def test_circusd_is_given_up_when_it_cannot_be_started() -> None:
    record = CircusRecord()
    for took_over in (True, False, False):
        decision, record = circusd_died(record, took_over, CircusLimits(max_failures=3), 0.0)
        assert isinstance(decision, Restart)
    assert circusd_died(record, False, CircusLimits(max_failures=3), 0.0)[0] == GiveUp(
        "could not be started 3 times in a row"
    )


@given(st.lists(st.tuples(st.floats(0, 1000), st.integers(0, 2)), max_size=50))
def test_circusd_that_takes_over_now_and_then_never_ends_a_server(deaths: list[tuple[float, int]]) -> None:
    now = 0.0
    record = CircusRecord()
    for interval_s, failures in deaths:
        now += interval_s
        for took_over in (True, *[False] * failures):
            decision, record = circusd_died(record, took_over, CircusLimits(), now)
            assert isinstance(decision, Restart)
            assert decision.delay_s <= CircusLimits.max_delay_s
