"""What the requests of one frontend have used since it started, for metrics."""

from __future__ import annotations

from collections.abc import Iterator

from dynamo_local.core.usage.records import UsageRecord
from dynamo_local.core.usage.totals import FAILED_FROM
from dynamo_local.monitor.families import (
    USAGE_CACHED,
    USAGE_OUTPUT,
    USAGE_PROMPT,
    USAGE_REQUESTS,
    USAGE_SECONDS,
    Metric,
)
from dynamo_local.monitor.metrics import Sample

MOST_KEYS = 1000
"""Keys that have series of their own. What later ones use counts in the totals alone."""

_Series = tuple[Metric, tuple[str, ...]]


class UsageCounts:
    """Counts by model, and by model and key."""

    def __init__(self, most_keys: int = MOST_KEYS) -> None:
        self._most_keys = most_keys
        self._keys: set[str] = set()
        self._totals: dict[_Series, float] = {}
        self._by_key: dict[_Series, float] = {}

    def note(self, record: UsageRecord) -> None:
        """Count a request."""
        self._add(self._totals, record, "")
        key = record.key or ""
        if len(self._keys) < self._most_keys:
            self._keys.add(key)
        if key in self._keys:
            self._add(self._by_key, record, key)

    def samples(self, *, by_key: bool) -> Iterator[Sample]:
        """Return the counts by model; with `by_key`, which is for administrators, by model and key instead."""
        for (metric, labels), value in (self._by_key if by_key else self._totals).items():
            yield Sample(metric, labels, value)

    @staticmethod
    def _add(counts: dict[_Series, float], record: UsageRecord, key: str) -> None:
        outcome = "failed" if record.status >= FAILED_FROM else "ok"
        labels = record.endpoint, key
        for series, value in (
            ((USAGE_REQUESTS, (*labels, outcome)), record.requests),
            ((USAGE_PROMPT, labels), record.prompt),
            ((USAGE_CACHED, labels), record.cached),
            ((USAGE_OUTPUT, labels), record.output),
            ((USAGE_SECONDS, labels), record.seconds),
        ):
            counts[series] = counts.get(series, 0.0) + value
