from __future__ import annotations

from datetime import datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.endpoints.awake.forecast import (
    DAYS,
    MOST_REQUESTS,
    SLOT_MINUTES,
    Usage,
    is_expected,
    keeps_awake,
    with_requests,
)

MONDAY = datetime(2026, 11, 23, 9, 2)  # noqa: DTZ001  # what a clock on the wall shows


def used_on(*days: int, first: int = 0) -> Usage:
    usage = with_requests(Usage(), MONDAY + timedelta(days=first), 0)
    for day in days:
        usage = with_requests(usage, MONDAY + timedelta(days=day))
    return usage


def test_what_was_used_on_the_same_weekday_twice_is_expected() -> None:
    assert is_expected(used_on(0, 7), MONDAY + timedelta(days=14))
    assert not is_expected(used_on(7), MONDAY + timedelta(days=14))
    assert not is_expected(used_on(0, 7), MONDAY + timedelta(days=15))
    assert not is_expected(used_on(0, 7), MONDAY + timedelta(days=14, minutes=SLOT_MINUTES))


def test_what_was_used_on_half_of_the_days_is_expected() -> None:
    assert is_expected(used_on(0, 1, 2), MONDAY + timedelta(days=3))
    assert is_expected(used_on(0, 1, 2), MONDAY + timedelta(days=6))
    assert not is_expected(used_on(0, 1, 2), MONDAY + timedelta(days=8))
    assert not is_expected(used_on(0, 1), MONDAY + timedelta(days=2))


def test_it_is_awake_a_little_before() -> None:
    slot = MONDAY.replace(minute=0) + timedelta(days=3)
    usage = used_on(0, 1, 2)
    assert not keeps_awake(usage, slot - timedelta(seconds=61))
    assert keeps_awake(usage, slot - timedelta(seconds=60))
    assert keeps_awake(usage, slot + timedelta(minutes=4, seconds=59))
    assert not keeps_awake(usage, slot + timedelta(minutes=5))


def test_nothing_is_expected_of_what_is_unknown() -> None:
    assert not keeps_awake(Usage(), MONDAY)


uses = st.lists(st.tuples(st.integers(0, 40 * 24 * 60), st.integers(0, 2**40)), max_size=60)


@given(uses)
def test_what_is_kept_is_bounded_and_old_use_is_forgotten(drawn: list[tuple[int, int]]) -> None:
    usage, now = Usage(), MONDAY
    for minutes, requests in sorted(drawn):
        now = MONDAY + timedelta(minutes=minutes)
        usage = with_requests(usage, now, requests)
        assert usage.first_day is not None
        assert now.toordinal() - DAYS <= usage.first_day <= now.toordinal()
        assert len(usage.days) <= DAYS + 1
        assert all(now.toordinal() - DAYS <= day <= now.toordinal() for day in usage.days)
        assert all(0 <= slot < 24 * 60 / SLOT_MINUTES for slots in usage.days.values() for slot in slots)
        assert all(0 < count <= MOST_REQUESTS for slots in usage.days.values() for count in slots.values())


@given(uses, st.integers(0, 40 * 24 * 60))
def test_what_is_expected_was_used_at_that_time_of_the_day_twice(drawn: list[tuple[int, int]], minutes: int) -> None:
    usage, now = Usage(), MONDAY + timedelta(minutes=minutes)
    for before, requests in sorted(drawn):
        if before < minutes:
            usage = with_requests(usage, MONDAY + timedelta(minutes=before), requests)
    if is_expected(usage, now):
        slot = (now.hour * 60 + now.minute) // SLOT_MINUTES
        assert sum(slot in slots for day, slots in usage.days.items() if day < now.toordinal()) >= 2
