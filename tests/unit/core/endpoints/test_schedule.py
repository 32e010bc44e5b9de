from __future__ import annotations

from datetime import datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.endpoints.schedule import (
    DAYS,
    DAYS_OF_USE,
    LATE,
    MOST_REQUESTS,
    SLOT_MINUTES,
    Schedule,
    Usage,
    is_due,
    is_expected,
    keeps_awake,
    next_change,
    parse_entry,
    parse_schedule,
    was_often_used,
    with_requests,
)
from dynamo_local.core.errors import ConfigError

MONDAY = datetime(2026, 11, 23)  # noqa: DTZ001  # what a clock on the wall shows


def at(days: int, time: str) -> datetime:
    hours, minutes = time.split(":")
    return MONDAY + timedelta(days=days, hours=int(hours), minutes=int(minutes))


def test_a_range_keeps_awake_on_its_days() -> None:
    schedule = parse_schedule(["mon-fri 08:00-18:30"])
    assert not keeps_awake(schedule, at(0, "07:59"))
    assert keeps_awake(schedule, at(0, "08:00"))
    assert keeps_awake(schedule, at(4, "18:29"))
    assert not keeps_awake(schedule, at(4, "18:30"))
    assert not keeps_awake(schedule, at(5, "12:00"))
    assert next_change(schedule, at(4, "12:00")) == at(4, "18:30")
    assert next_change(schedule, at(4, "20:00")) == at(7, "08:00")


def test_a_range_over_midnight_belongs_to_the_day_on_which_it_begins() -> None:
    schedule = parse_schedule(["fri 22:00-02:00"])
    assert keeps_awake(schedule, at(5, "01:59"))
    assert not keeps_awake(schedule, at(5, "02:00"))
    assert not keeps_awake(schedule, at(4, "01:00"))
    assert keeps_awake(parse_schedule(["sun 22:00-24:00"]), at(6, "23:59"))


def test_days_go_over_the_end_of_the_week() -> None:
    assert parse_entry("sat-mon 08:00").days == {5, 6, 0}
    assert parse_entry("Mon,wed-thu 08:00").days == {0, 2, 3}


def test_ranges_that_touch_are_one() -> None:
    schedule = parse_schedule(["daily 00:00-24:00"])
    assert keeps_awake(schedule, at(3, "00:00"))
    assert next_change(schedule, at(3, "10:00")) is None


def test_a_single_time_wakes_once() -> None:
    schedule = parse_schedule(["daily 20:00"])
    assert not keeps_awake(schedule, at(0, "20:00"))
    assert not is_due(schedule, at(0, "19:58"), at(0, "19:59"))
    assert is_due(schedule, at(0, "19:59"), at(0, "20:00"))
    assert not is_due(schedule, at(0, "20:00"), at(0, "20:01"))
    assert next_change(schedule, at(0, "20:00")) == at(1, "20:00")


def test_a_time_that_daylight_saving_leaves_out_or_repeats_counts_once() -> None:
    schedule = parse_schedule(["daily 02:30"])
    # The clock goes from 2 to 3.
    assert is_due(schedule, at(0, "01:59"), at(0, "03:00"))
    # The clock goes from 3 back to 2: `since` is the latest time that it has shown.
    assert not is_due(schedule, at(0, "02:59"), at(0, "02:30"))


def test_a_time_that_is_long_over_wakes_nobody() -> None:
    assert not is_due(parse_schedule(["daily 20:00"]), at(0, "08:00"), at(1, "08:00"))


@pytest.mark.parametrize(
    ("entry", "cause"),
    [
        ("", "'' has not two words"),
        ("mon 08:00 - 18:00", "'mon 08:00 - 18:00' has not two words"),
        ("mon-fri 8:00-18:00", "'mon-fri 8:00-18:00' has '8:00' for a time"),
        ("mon 08:60", "'mon 08:60' has '08:60' for a time"),
        ("mon 08:00-", "'mon 08:00-' has '' for a time"),
        ("mon 08:00-08:00", "'mon 08:00-08:00' begins and ends at 08:00"),
        ("mon 24:00", "'mon 24:00' begins at 24:00"),
        ("monday 08:00", "'monday 08:00' has 'monday' for a day"),
        ("mon- 08:00", "'mon- 08:00' has '' for a day"),
        ("mon,,tue 08:00", "'mon,,tue 08:00' has '' for a day"),
    ],
)
def test_a_mistake_names_its_entry(entry: str, cause: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_schedule(["daily 08:00", entry])
    assert caught.value.cause == cause
    assert caught.value.remedy


clock_times = st.integers(0, 24 * 60 - 1).map(lambda minutes: f"{minutes // 60:02}:{minutes % 60:02}")
day_words = st.sampled_from(["daily", *DAYS, "mon-fri", "sat-sun", "sun-mon"])
single = st.builds(lambda days, time: f"{days} {time}", day_words, clock_times)
ranges = st.builds(
    lambda days, begin, end: f"{days} {begin}-{end if end != begin else '24:00'}", day_words, clock_times, clock_times
)
schedules = st.lists(ranges, max_size=3).map(parse_schedule)
moments = st.integers(0, 14 * 24 * 60).map(lambda minutes: MONDAY + timedelta(minutes=minutes))


@given(schedules, moments)
def test_nothing_changes_before_the_next_change(schedule: Schedule, now: datetime) -> None:
    change, awake = next_change(schedule, now), keeps_awake(schedule, now)
    if change is not None:
        assert change > now
        assert keeps_awake(schedule, change) != awake
    last = min(change or now + timedelta(days=8), now + timedelta(days=8))
    step = (last - now) / 50
    assert all(keeps_awake(schedule, now + number * step) == awake for number in range(50))


@given(schedules, moments)
def test_each_week_is_alike(schedule: Schedule, now: datetime) -> None:
    assert keeps_awake(schedule, now) == keeps_awake(schedule, now + timedelta(days=7))


@given(single, moments, st.lists(st.integers(-90, 90), max_size=60))
def test_a_single_time_counts_once_however_the_clock_is_set(entry: str, start: datetime, steps: list[int]) -> None:
    schedule, latest, now = parse_schedule([entry]), start, start
    woken: list[datetime] = []
    for minutes in steps:
        now += timedelta(minutes=minutes)
        if is_due(schedule, latest, now):
            woken.append(now)
        latest = max(latest, now)
    assert woken == sorted(set(woken))
    begins = {
        time
        for day in range(-2, 40)
        for time in [at(day, entry.split()[1])]
        if time.weekday() in parse_entry(entry).days
    }
    assert len(woken) <= sum(start - LATE < time <= latest for time in begins)


FIRST_MONDAY = datetime(2026, 11, 23, 9, 2)  # noqa: DTZ001  # what a clock on the wall shows


def used_on(*days: int, first: int = 0) -> Usage:
    usage = with_requests(Usage(), FIRST_MONDAY + timedelta(days=first), 0)
    for day in days:
        usage = with_requests(usage, FIRST_MONDAY + timedelta(days=day))
    return usage


def test_what_was_used_on_the_same_weekday_twice_is_expected() -> None:
    assert is_expected(used_on(0, 7), FIRST_MONDAY + timedelta(days=14))
    assert not is_expected(used_on(7), FIRST_MONDAY + timedelta(days=14))
    assert not is_expected(used_on(0, 7), FIRST_MONDAY + timedelta(days=15))
    assert not is_expected(used_on(0, 7), FIRST_MONDAY + timedelta(days=14, minutes=SLOT_MINUTES))


def test_what_was_used_on_half_of_the_days_is_expected() -> None:
    assert is_expected(used_on(0, 1, 2), FIRST_MONDAY + timedelta(days=3))
    assert is_expected(used_on(0, 1, 2), FIRST_MONDAY + timedelta(days=6))
    assert not is_expected(used_on(0, 1, 2), FIRST_MONDAY + timedelta(days=8))
    assert not is_expected(used_on(0, 1), FIRST_MONDAY + timedelta(days=2))


def test_it_is_awake_a_little_before() -> None:
    slot = FIRST_MONDAY.replace(minute=0) + timedelta(days=3)
    usage = used_on(0, 1, 2)
    assert not was_often_used(usage, slot - timedelta(seconds=61))
    assert was_often_used(usage, slot - timedelta(seconds=60))
    assert was_often_used(usage, slot + timedelta(minutes=4, seconds=59))
    assert not was_often_used(usage, slot + timedelta(minutes=5))


def test_nothing_is_expected_of_what_is_unknown() -> None:
    assert not was_often_used(Usage(), FIRST_MONDAY)


uses = st.lists(st.tuples(st.integers(0, 40 * 24 * 60), st.integers(0, 2**40)), max_size=60)


@given(uses)
def test_what_is_kept_is_bounded_and_old_use_is_forgotten(drawn: list[tuple[int, int]]) -> None:
    usage, now = Usage(), FIRST_MONDAY
    for minutes, requests in sorted(drawn):
        now = FIRST_MONDAY + timedelta(minutes=minutes)
        usage = with_requests(usage, now, requests)
        assert usage.first_day is not None
        assert now.toordinal() - DAYS_OF_USE <= usage.first_day <= now.toordinal()
        assert len(usage.days) <= DAYS_OF_USE + 1
        assert all(now.toordinal() - DAYS_OF_USE <= day <= now.toordinal() for day in usage.days)
        assert all(0 <= slot < 24 * 60 / SLOT_MINUTES for slots in usage.days.values() for slot in slots)
        assert all(0 < count <= MOST_REQUESTS for slots in usage.days.values() for count in slots.values())


@given(uses, st.integers(0, 40 * 24 * 60))
def test_what_is_expected_was_used_at_that_time_of_the_day_twice(drawn: list[tuple[int, int]], minutes: int) -> None:
    usage, now = Usage(), FIRST_MONDAY + timedelta(minutes=minutes)
    for before, requests in sorted(drawn):
        if before < minutes:
            usage = with_requests(usage, FIRST_MONDAY + timedelta(minutes=before), requests)
    if is_expected(usage, now):
        slot = (now.hour * 60 + now.minute) // SLOT_MINUTES
        assert sum(slot in slots for day, slots in usage.days.items() if day < now.toordinal()) >= 2
