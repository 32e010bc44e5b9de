"""Records folded into totals by the hour, and later by the day; and how much of which journal they hold. Pure.

Totals and the parts of journals that they hold are one document, which is replaced as a whole: whenever the one who
folds is killed, each record is in the totals, or behind the part of its journal that they hold, and never in both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from dynamo_local.core.errors import StateError
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
