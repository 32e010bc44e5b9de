"""A forecast of an endpoint's use, by when it was used before. Pure.

The day has slots of five minutes of local time. A slot is expected to be used if it was on both of the same weekdays
of the last two weeks, or on at least half of the days known of these two weeks, at least three. Days on which no
server ran count as days without use.
"""

from __future__ import annotations

from datetime import datetime, timedelta

import msgspec

SLOT_MINUTES = 5
DAYS = 14
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
    days = {day: slots for day, slots in usage.days.items() if today - DAYS <= day <= today}
    if requests > 0:
        slots = days.get(today, {})
        days[today] = {**slots, slot: min(slots.get(slot, 0) + requests, MOST_REQUESTS)}
    first = today if usage.first_day is None else min(usage.first_day, today)
    return Usage(max(first, today - DAYS), days)


def is_expected(usage: Usage, at: datetime) -> bool:
    """Whether the slot at this local time is expected to be used, by the days before it."""
    if usage.first_day is None:
        return False
    today, slot = at.toordinal(), _slot(at)
    known = range(max(usage.first_day, today - DAYS), today)
    used = sum(slot in usage.days.get(day, {}) for day in known)
    if used >= _LEAST_DAYS and 2 * used >= len(known):
        return True
    weekdays = [today - 7 * week for week in range(1, DAYS // 7 + 1)]
    return sum(slot in usage.days.get(day, {}) for day in weekdays) >= _LEAST_WEEKS


def keeps_awake(usage: Usage, now: datetime, ahead_s: float = AHEAD_S) -> bool:
    """Whether the endpoint is to be awake for a slot that is expected to be used, now or `ahead_s` from now."""
    return is_expected(usage, now) or is_expected(usage, now + timedelta(seconds=ahead_s))


def _slot(at: datetime) -> int:
    return (at.hour * 60 + at.minute) // SLOT_MINUTES
