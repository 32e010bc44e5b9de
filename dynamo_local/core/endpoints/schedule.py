"""Whether an endpoint is to be awake without a request: by its schedule, or by a forecast of its use. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

import msgspec

from dynamo_local.core.errors import ConfigError

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
MOST_ENTRIES = 64
MOST_ENTRY_CHARACTERS = 80

LATE = timedelta(hours=1)
"""How late a single time still wakes: it may have fallen into an hour that was left out, or a machine slept."""

_DAILY = "daily"
_TIME = re.compile(r"([01]\d|2[0-3]):([0-5]\d)|24:00")
_REMEDY = 'write days and times, such as "mon-fri 08:00-18:30", "sat,sun 22:00-02:00" or "daily 20:00"'
_DAY_MINUTES = 24 * 60


@dataclass(frozen=True)
class Span:
    """An entry: days on which it begins (0 is Monday), and its beginning and length in minutes; length 0 is a single
    time."""

    days: frozenset[int]
    begins: int
    minutes: int


Schedule = tuple[Span, ...]


def parse_schedule(entries: Iterable[str]) -> Schedule:
    """The schedule of these entries. Raises ConfigError, whose cause begins with the entry."""
    return tuple(parse_entry(entry) for entry in entries)


def parse_entry(text: str) -> Span:
    """Parses an entry of a schedule. Raises ConfigError, whose cause begins with the entry."""
    words = text.lower().split()
    if len(words) != 2:
        raise ConfigError(f"{text!r} has not two words", _REMEDY)
    begin, hyphen, end = words[1].partition("-")
    begins = _minutes(text, begin)
    if begins == _DAY_MINUTES:
        raise ConfigError(f"{text!r} begins at 24:00", "write 00:00, of the next day")
    if not hyphen:
        return Span(_days(text, words[0]), begins, 0)
    ends = _minutes(text, end)
    if begins == ends:
        raise ConfigError(f"{text!r} begins and ends at {begin}", "write 00:00-24:00 for a whole day")
    return Span(_days(text, words[0]), begins, ends - begins if ends > begins else ends - begins + _DAY_MINUTES)


def keeps_awake(schedule: Schedule, now: datetime) -> bool:
    """Whether a range keeps the endpoint awake. `now`: the local time, as a clock shows it."""
    return any(begin <= now < end for begin, end in _around(schedule, now) if end > begin)


def is_due(schedule: Schedule, since: datetime, now: datetime) -> bool:
    """Whether a single time has come after `since`, the latest local time at which this was asked before, not more
    than LATE ago. Nothing is due while the clock shows an earlier time than it has shown already."""
    first = max(since, now - LATE)
    return any(first < begin <= now for begin, end in _around(schedule, now) if end == begin)


def next_change(schedule: Schedule, now: datetime) -> datetime | None:
    """The next local time at which the endpoint is woken, or a range that keeps it awake ends. None without one."""
    awake = keeps_awake(schedule, now)
    spans = list(_around(schedule, now, days=8))
    times = sorted({time for span in spans for time in span if time > now})
    moments = {begin for begin, end in spans if begin == end}
    return next(
        (time for time in times if keeps_awake(schedule, time) != awake or (time in moments and not awake)), None
    )


def _around(schedule: Schedule, now: datetime, days: int = 1) -> Iterator[tuple[datetime, datetime]]:
    """Beginning and end of all that begins yesterday, today, or within so many days."""
    midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
    for ahead in range(-1, days + 1):
        day = midnight + timedelta(days=ahead)
        for span in schedule:
            if day.weekday() in span.days:
                begin = day + timedelta(minutes=span.begins)
                yield begin, begin + timedelta(minutes=span.minutes)


def _minutes(text: str, time: str) -> int:
    if not _TIME.fullmatch(time):
        raise ConfigError(f"{text!r} has {time!r} for a time", _REMEDY)
    hours, minutes = time.split(":")
    return int(hours) * 60 + int(minutes)


def _days(text: str, words: str) -> frozenset[int]:
    if words == _DAILY:
        return frozenset(range(7))
    return frozenset(day for part in words.split(",") for day in _run_of_days(text, part))


def _run_of_days(text: str, part: str) -> Sequence[int]:
    first, hyphen, last = part.partition("-")
    begin, end = _day(text, first), _day(text, last if hyphen else first)
    return [day % 7 for day in range(begin, (end if end >= begin else end + 7) + 1)]


def _day(text: str, word: str) -> int:
    if word not in DAYS:
        raise ConfigError(f"{text!r} has {word!r} for a day", f"write {', '.join(DAYS)} or {_DAILY}")
    return DAYS.index(word)


# A forecast of an endpoint's use, by when it was used before. Pure.

SLOT_MINUTES = 5
DAYS_OF_USE = 14
"""Days that are remembered, beside the present one."""

AHEAD_S = 60.0
"""How long before a slot that is expected to be used the endpoint is woken."""

MOST_REQUESTS = 65_535
"""At which the counter of a slot stays."""

_LEAST_WEEKS = 2
_LEAST_DAYS = 3


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    """Requests by day and slot of the day. Days are counted as `date.toordinal` does. `first_day`: from which on the
    use is known; None before anything is."""

    first_day: int | None = None
    days: dict[int, dict[int, int]] = {}


def with_requests(usage: Usage, at: datetime, requests: int = 1) -> Usage:
    """The usage after so many requests (0: it is only known that there was none) at this local time. What is older than
    DAYS is forgotten."""
    today, slot = at.toordinal(), _slot(at)
    days = {day: slots for day, slots in usage.days.items() if today - DAYS_OF_USE <= day <= today}
    if requests > 0:
        slots = days.get(today, {})
        days[today] = {**slots, slot: min(slots.get(slot, 0) + requests, MOST_REQUESTS)}
    first = today if usage.first_day is None else min(usage.first_day, today)
    return Usage(max(first, today - DAYS_OF_USE), days)


def is_expected(usage: Usage, at: datetime) -> bool:
    """Whether the slot at this local time is expected to be used, by the days before it."""
    if usage.first_day is None:
        return False
    today, slot = at.toordinal(), _slot(at)
    known = range(max(usage.first_day, today - DAYS_OF_USE), today)
    used = sum(slot in usage.days.get(day, {}) for day in known)
    if used >= _LEAST_DAYS and 2 * used >= len(known):
        return True
    weekdays = [today - 7 * week for week in range(1, DAYS_OF_USE // 7 + 1)]
    return sum(slot in usage.days.get(day, {}) for day in weekdays) >= _LEAST_WEEKS


def was_often_used(usage: Usage, now: datetime, ahead_s: float = AHEAD_S) -> bool:
    """Whether the endpoint is to be awake for a slot that is expected to be used, now or `ahead_s` from now."""
    return is_expected(usage, now) or is_expected(usage, now + timedelta(seconds=ahead_s))


def _slot(at: datetime) -> int:
    return (at.hour * 60 + at.minute) // SLOT_MINUTES
