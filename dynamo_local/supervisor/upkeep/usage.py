"""Folds what frontends have written about the use of requests into totals, so that their journals stay small, and tells
what was used."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from dynamo_local.control.operations import GET_USAGE, Call
from dynamo_local.core.errors import StateError, UsageError
from dynamo_local.core.usage import KEEP_DAYS
from dynamo_local.core.usage.totals import DEFAULT_GROUPING, as_document, parse_grouping, parse_moment, report
from dynamo_local.supervisor.server.reports.report import Report, ReportOnce
from dynamo_local.tasks import finish_in_thread
from state.paths import StatePaths
from state.usage.totals import UsageStore, read_usage

EVERY_S = 30.0
"""Between two folds, in seconds. What is not folded yet is read from the journals: totals are never out of date."""


@dataclass
class UsageUpkeep:
    """Folds the usage of one server. `keep_days`: for which totals are kept."""

    paths: StatePaths
    report: Report
    keep_days: int = KEEP_DAYS
    wall_clock: Callable[[], float] = time.time
    _store: UsageStore = field(init=False)
    _failure: ReportOnce = field(init=False)

    def __post_init__(self) -> None:
        self._store = UsageStore(self.paths, keep_days=self.keep_days)
        self._failure = ReportOnce(self.report)

    async def run(self) -> None:
        """Fold at once, and then now and then, until cancelled."""
        while True:
            await finish_in_thread(self.fold)
            await asyncio.sleep(EVERY_S)

    def fold(self) -> None:
        """Fold once. Blocks for milliseconds. Failures are reported, and end nothing: journals keep what they have."""
        try:
            folded = self._store.fold(self.wall_clock())
        except StateError as error:
            self._failure.note(f"usage is not folded: {error}")
            return
        self._failure.note("")
        for note in folded.notes:
            self.report.step(note)
        if folded.damaged:
            self.report.step(
                f"{folded.damaged} lines in {self.paths.usage_dir} are damaged: more was used than is counted"
            )

    async def tell(self, call: Call) -> dict[str, Any]:
        """Carry out GET_USAGE. Raises UsageError, StateError."""
        query, now = call.query, datetime.fromtimestamp(self.wall_clock(), UTC)
        if unknown := query.keys() - GET_USAGE.query.keys():
            raise UsageError(f"there is no parameter {min(unknown)[:60]!r}")
        since, until = (parse_moment(text, now) if text else None for text in map(query.get, ("since", "until")))
        by = parse_grouping(query["by"]) if "by" in query else DEFAULT_GROUPING
        return as_document(report(await asyncio.to_thread(read_usage, self.paths), since, until, by))
