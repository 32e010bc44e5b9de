"""The frontend's side of usage: records go to its journal and into its metrics, and administrators are told."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from urllib.parse import parse_qsl

import msgspec

from components.frontend.http.usage import UsageMeter
from dynamo_local.core.errors import StateError, UsageError
from dynamo_local.core.http.bounds.admission import Refusal
from dynamo_local.core.usage.records import UsageRecord
from dynamo_local.core.usage.report import DEFAULT_GROUPING, as_document, parse_grouping, parse_moment, report
from dynamo_local.monitor.families import USAGE_LOST, USAGE_PENDING
from dynamo_local.monitor.metrics import Sample
from dynamo_local.monitor.usage_counts import UsageCounts
from state.paths import StatePaths
from state.usage.journal import UsageJournal
from state.usage.totals import read_usage

_log = logging.getLogger(__name__)

_FLUSH_EVERY_S = 1.0
_FIELDS = frozenset({"since", "until", "by"})


class FrontendUsage:
    """What the requests of one frontend use."""

    def __init__(self, paths: StatePaths, lease: str) -> None:
        self._paths = paths
        self._journal = UsageJournal(paths, lease, lambda why: _log.error("%s", why))
        self._counts = UsageCounts()
        self.meter = UsageMeter(self._note)

    def _note(self, record: UsageRecord) -> None:
        self._counts.note(record)
        self._journal.write(record)

    async def run(self) -> None:
        """Write records that could not be written before, until cancelled."""
        while True:
            await asyncio.sleep(_FLUSH_EVERY_S)
            if self._journal.pending:
                self._journal.flush()

    def close(self) -> None:
        """End the journal: the last request has been answered."""
        lost = self._journal.lost
        self._journal.close()
        if self._journal.lost > lost:
            _log.error("the usage of %d requests could not be written, and is lost", self._journal.lost - lost)

    def samples_by_key(self) -> Iterator[Sample]:
        """Return of the samples those that administrators are shown by key."""
        return self._counts.samples(by_key=True)

    def samples(self) -> Iterator[Sample]:
        """Return the samples for /metrics, without the names of keys."""
        yield from self._counts.samples(by_key=False)
        yield Sample(USAGE_PENDING, (), self._journal.pending)
        yield Sample(USAGE_LOST, (), self._journal.lost)

    async def answer(self, query: bytes) -> tuple[int, bytes] | Refusal:
        """Return status and body of the answer to an administrator who asks what was used."""
        now = datetime.fromtimestamp(time.time(), UTC)
        asked = dict(parse_qsl(query.decode("latin-1"), keep_blank_values=True))
        if unknown := asked.keys() - _FIELDS:
            return _bad(f"there is no parameter {min(unknown)[:60]!r}")
        try:
            since, until = (parse_moment(text, now) if text else None for text in map(asked.get, ("since", "until")))
            by = parse_grouping(asked["by"]) if "by" in asked else DEFAULT_GROUPING
        except UsageError as error:
            return _bad(str(error))
        try:
            totals = await asyncio.to_thread(read_usage, self._paths)
        except StateError as error:
            return Refusal(503, str(error), "ServiceUnavailableError")
        return 200, msgspec.json.encode(as_document(report(totals, since, until, by)))


def _bad(why: str) -> Refusal:
    return Refusal(400, why, "BadRequestError")
