"""Records folded into totals by the hour, and later by the day; and how much of which journal they hold. Pure.

Totals and the parts of journals that they hold are one document, which is replaced as a whole: whenever the one who
folds is killed, each record is in the totals, or behind the part of its journal that they hold, and never in both.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, get_args

import msgspec

from dynamo_local.core.errors import StateError, UsageError
from dynamo_local.core.usage.records import Lines, UsageRecord

SCHEMA_VERSION = 1

HOUR_S = 3600
DAY_S = 24 * HOUR_S

HOURLY_DAYS = 8
"""Totals older than this, in days, are kept by the day (of UTC)."""

FAILED_FROM = 400
"""Statuses from here on are of requests that have failed, or were left."""


class UsageSpan(msgspec.Struct, frozen=True, order=True):
    """An hour or a day, from `start` in seconds since 1970, of one key and one endpoint."""

    start: int
    seconds: int
    key: str | None
    endpoint: str


class Sums(msgspec.Struct):
    """What requests have used together. `failed` of the `requests` have failed, or were left by their clients. `cached`
    of the `prompt` tokens were in a worker's KV cache. `seconds`: the times of all requests, added up."""

    requests: int = 0
    failed: int = 0
    prompt: int = 0
    cached: int = 0
    output: int = 0
    seconds: float = 0.0

    def add(self, other: Sums) -> None:
        """Add what others have used."""
        self.requests += other.requests
        self.failed += other.failed
        self.prompt += other.prompt
        self.cached += other.cached
        self.output += other.output
        self.seconds += other.seconds


class UsageTotals:
    """What all requests have used.

    `folded`: by the name of each journal there is, the number of its bytes that are held. `lost`: records that could
    not be written; `damaged`: lines that could not be read. What these had used is unknown.
    """

    def __init__(self) -> None:
        self.sums: dict[UsageSpan, Sums] = {}
        self.folded: dict[str, int] = {}
        self.lost = 0
        self.damaged = 0

    def add(self, record: UsageRecord) -> None:
        """Add what a request has used, to the hour in which its answer ended."""
        self.lost += record.lost
        if record.lost and not record.requests:
            return
        start = int(record.time // HOUR_S) * HOUR_S
        failed = record.requests if record.status >= FAILED_FROM else 0
        sums = Sums(record.requests, failed, record.prompt, record.cached, record.output, record.seconds)
        self._add(UsageSpan(start, HOUR_S, record.key, record.endpoint), sums)

    def fold(self, journal: str, lines: Lines, size: int) -> None:
        """Add the next part of a journal, of so many bytes."""
        for record in lines.records:
            self.add(record)
        self.damaged += lines.damaged
        self.folded[journal] = self.folded.get(journal, 0) + size

    def forget(self, journals: Iterable[str]) -> bool:
        """Forget journals that are no more. Return whether any was known."""
        before = len(self.folded)
        for journal in journals:
            self.folded.pop(journal, None)
        return len(self.folded) < before

    def age(self, now: float, keep_days: int) -> None:
        """Make days of hours that are old, and drop what is older than `keep_days`."""
        hourly_from = (int(now) // DAY_S - HOURLY_DAYS) * DAY_S
        kept_from = (int(now) // DAY_S - keep_days) * DAY_S
        for span in [span for span in self.sums if span.start < max(hourly_from, kept_from)]:
            if span.start >= kept_from and span.seconds == DAY_S:
                continue
            sums = self.sums.pop(span)
            if span.start >= kept_from:
                self._add(UsageSpan(span.start // DAY_S * DAY_S, DAY_S, span.key, span.endpoint), sums)

    def _add(self, span: UsageSpan, sums: Sums) -> None:
        known = self.sums.get(span)
        if known is None:
            self.sums[span] = sums
        else:
            known.add(sums)


class _Document(msgspec.Struct):
    schema_version: int
    sequence: int
    folded: dict[str, int]
    lost: int
    damaged: int
    sums: list[tuple[int, int, str | None, str, int, int, int, int, int, float]]


class NewerTotalsError(StateError):
    """The totals were written by a later release."""


def encode_totals(totals: UsageTotals, sequence: int) -> bytes:
    """Return the document. `sequence` grows with each that is written."""
    document = _Document(
        SCHEMA_VERSION, sequence, totals.folded, totals.lost, totals.damaged, list(_rows(totals.sums.items()))
    )
    return msgspec.json.encode(document) + b"\n"


def decode_totals(data: bytes) -> tuple[UsageTotals, int]:
    """Inverse of `encode_totals`. Raises StateError for anything else, NewerTotalsError for a later release's."""
    try:
        version = msgspec.json.decode(data, type=_Version).schema_version
        if version > SCHEMA_VERSION:
            raise NewerTotalsError(
                f"the totals of usage have version {version}, and this release knows {SCHEMA_VERSION}",
                "use the release that wrote them, or a later one",
            )
        document = msgspec.json.decode(data, type=_Document)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise StateError(f"the totals of usage are damaged: {error}") from error
    totals = UsageTotals()
    totals.folded, totals.lost, totals.damaged = document.folded, document.lost, document.damaged
    totals.sums = {UsageSpan(*row[:4]): Sums(*row[4:]) for row in document.sums}
    return totals, document.sequence


class _Version(msgspec.Struct):
    schema_version: int


def _rows(items: Iterable[tuple[UsageSpan, Sums]]) -> Iterator[Any]:
    for span, sums in items:
        yield (*msgspec.structs.astuple(span), *msgspec.structs.astuple(sums))


# What was used in a time, by key, endpoint or day. Pure.

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
