"""The frontend's side of usage: records go to its journal and into its metrics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

from components.frontend.http.usage import UsageMeter
from dynamo_local.core.usage.records import UsageRecord
from dynamo_local.monitor.families import USAGE_LOST, USAGE_PENDING
from dynamo_local.monitor.metrics import Sample
from dynamo_local.monitor.usage_counts import UsageCounts
from state.paths import StatePaths
from state.usage.journal import UsageJournal

_log = logging.getLogger(__name__)

_FLUSH_EVERY_S = 1.0


class FrontendUsage:
    """What the requests of one frontend use."""

    def __init__(self, paths: StatePaths, lease: str) -> None:
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
