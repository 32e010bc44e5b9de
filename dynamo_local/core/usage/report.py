"""What was used in a time, by key, endpoint or day. Pure."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, get_args

from dynamo_local.core.errors import UsageError
from dynamo_local.core.usage.totals import DAY_S, HOUR_S, Sums, UsageSpan, UsageTotals

Grouping = Literal["key", "endpoint", "day"]
GROUPINGS: Final[tuple[Grouping, ...]] = get_args(Grouping)
DEFAULT_GROUPING: Final[tuple[Grouping, ...]] = ("key", "endpoint")

_LAST = re.compile(r"([1-9][0-9]{0,8})(m|min|h|d|w)")
_UNITS_S: Final = {"m": 60, "min": 60, "h": HOUR_S, "d": DAY_S, "w": 7 * DAY_S}
_HOW = "write a time such as 12h, 1d or 2w before now, a date such as 2026-05-31, or 2026-05-31T14:00"


@dataclass(frozen=True)
class UsageRow:
    """What one group has used. `group`: by the groupings that were asked for, in their order."""

    group: tuple[str | None, ...]
    sums: Sums


@dataclass(frozen=True)
class UsageReport:
    """What was used from `since` until `until`, in seconds since 1970: whole hours, or days where hours are not kept
    any more. None: from the first, or until now. `lost` records and `damaged` lines are in no row."""

    by: tuple[Grouping, ...]
    since: int | None
    until: int | None
    rows: tuple[UsageRow, ...]
    total: Sums
    lost: int
    damaged: int


def report(
    totals: UsageTotals,
    since: float | None = None,
    until: float | None = None,
    by: Sequence[Grouping] = DEFAULT_GROUPING,
) -> UsageReport:
    """Return what was used from `since` until `until`, in seconds since 1970: every hour of which a part is within.

    `lost` and `damaged` are of all times.
    """
    groups: dict[tuple[str | None, ...], Sums] = {}
    whole = Sums()
    begins: int | None = None
    for span, sums in totals.sums.items():
        if (since is not None and span.start + span.seconds <= since) or (until is not None and span.start >= until):
            continue
        begins = span.start if begins is None else min(begins, span.start)
        groups.setdefault(tuple(_value(span, each) for each in by), Sums()).add(sums)
        whole.add(sums)
    rows = sorted(groups.items(), key=lambda item: tuple((value is not None, value or "") for value in item[0]))
    if since is not None:
        hour = int(since // HOUR_S) * HOUR_S
        begins = hour if begins is None else min(begins, hour)
    return UsageReport(
        tuple(by),
        begins,
        None if until is None else -(-int(until) // HOUR_S) * HOUR_S,
        tuple(UsageRow(group, sums) for group, sums in rows),
        whole,
        totals.lost,
        totals.damaged,
    )


def parse_grouping(text: str) -> tuple[Grouping, ...]:
    """Read groupings such as "key,day". Empty: all in one row. Raises UsageError."""
    found: list[Grouping] = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        known = next((each for each in GROUPINGS if each == word), None)
        if known is None:
            raise UsageError(f"usage cannot be shown by {word!r}", f"choose among {', '.join(GROUPINGS)}")
        if known not in found:
            found.append(known)
    return tuple(found)


def parse_moment(text: str, now: datetime) -> float:
    """Read a moment, in seconds since 1970: so long before `now`, or a date, or a date and a time. Without a time zone
    it is in the zone of `now`. Raises UsageError."""
    if (last := _LAST.fullmatch(text.strip())) is not None:
        return now.timestamp() - int(last[1]) * _UNITS_S[last[2]]
    try:
        moment = datetime.fromisoformat(text.strip())
        return (moment if moment.tzinfo is not None else moment.replace(tzinfo=now.tzinfo)).timestamp()
    except (ValueError, OverflowError, OSError) as error:
        raise UsageError(f"{text[:60]!r} is no time", _HOW) from error


def as_document(found: UsageReport) -> dict[str, Any]:
    """Return the report as JSON has it."""
    return {
        "object": "usage",
        "since": found.since,
        "until": found.until,
        "data": [_fields(found.by, row.group, row.sums) for row in found.rows],
        "total": _fields((), (), found.total),
        "lost_records": found.lost,
        "damaged_records": found.damaged,
    }


def as_csv(found: UsageReport) -> str:
    """Return the report as CSV: a line of names, then one for each row. What has no key has an empty one."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*found.by, *_fields((), (), found.total)])
    for row in found.rows:
        writer.writerow([*("" if value is None else value for value in row.group), *_fields((), (), row.sums).values()])
    return text.getvalue()


def notes(found: UsageReport) -> list[str]:
    """Say what is missing."""
    told = []
    if found.lost:
        told.append(f"the records of {found.lost} requests could not be written: more was used than is shown")
    if found.damaged:
        told.append(f"{found.damaged} records could not be read: more was used than is shown")
    return told


def _fields(by: Sequence[Grouping], group: Sequence[str | None], sums: Sums) -> dict[str, Any]:
    return {
        **dict(zip(by, group, strict=True)),
        "requests": sums.requests,
        "failed_requests": sums.failed,
        "prompt_tokens": sums.prompt,
        "cached_tokens": sums.cached,
        "output_tokens": sums.output,
        "seconds": round(sums.seconds, 3),
    }


def _value(span: UsageSpan, by: Grouping) -> str | None:
    if by == "day":
        day = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=span.start)
        return f"{day:%Y-%m-%d}"
    return span.key if by == "key" else span.endpoint
