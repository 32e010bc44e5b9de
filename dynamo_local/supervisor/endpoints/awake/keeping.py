"""Whether an endpoint is to be awake without a request: by its schedule, and by a forecast of its use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from dynamo_local.core.endpoints.awake import forecast, schedule
from dynamo_local.core.endpoints.awake.forecast import Usage
from dynamo_local.core.endpoints.awake.idling import WakeCause
from dynamo_local.core.endpoints.awake.schedule import Schedule
from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.errors import StateError
from dynamo_local.supervisor.server.reports.report import Report, ReportOnce
from state.files import replace_file


@dataclass(frozen=True)
class Kept:
    """What holds now. `awake`: why the endpoint is kept awake, by `cause`; empty if it is not. `due`: whether a single
    time of its schedule has come. `next_at`: the local time at which its schedule changes this."""

    awake: str = ""
    due: bool = False
    next_at: datetime | None = None
    cause: WakeCause = "schedule"


@dataclass
class Keeping:
    """The clock of one endpoint's schedule. `wall_clock`: in seconds since 1970."""

    wall_clock: Callable[[], float]
    _latest: datetime | None = None
    _schedule: Schedule = ()
    _next_at: datetime | None = None

    def look(self, spec: EndpointSpec, usage: Usage) -> Kept:
        """Look at the clock."""
        if not spec.awake and not spec.forecast:
            self._latest = None
            return Kept()
        now = local_time(self.wall_clock())
        spans = schedule.parse_schedule(spec.awake)
        if spans != self._schedule or (self._next_at is not None and now >= self._next_at):
            self._schedule, self._next_at = spans, schedule.next_change(spans, now)
        due = self._latest is not None and schedule.is_due(spans, self._latest, now)
        self._latest = now if self._latest is None else max(self._latest, now)
        if schedule.keeps_awake(spans, now):
            return Kept("its schedule keeps it awake", due, self._next_at)
        if spec.forecast and forecast.keeps_awake(usage, now):
            return Kept("it was often used at this time", due, self._next_at, "forecast")
        return Kept("", due, self._next_at)


@dataclass
class KeptUsage:
    """When endpoints with a forecast were used, in memory and in a file that is written now and then.

    A file that cannot be read is begun anew: nothing but forecasts depends on it.
    """

    path: Path
    report: Report
    wall_clock: Callable[[], float]
    write_every_s: float = 300.0
    _found: dict[str, Usage] = field(default_factory=dict, init=False)
    _is_dirty: bool = field(default=False, init=False)

    def load(self) -> None:
        """Read the file. Blocks."""
        try:
            self._found = msgspec.json.decode(self.path.read_bytes(), type=dict[str, Usage])
        except FileNotFoundError:
            return
        except (OSError, msgspec.MsgspecError, UnicodeError) as error:
            self.report.step(f"the use of endpoints before now is unknown: {error}")

    def of(self, endpoint: str) -> Usage:
        return self._found.get(endpoint, Usage())

    def note(self, spec: EndpointSpec, requests: int) -> None:
        """Note that an endpoint with a forecast had so many requests just now; 0: none."""
        if not spec.forecast:
            return
        before, now = self.of(spec.name), local_time(self.wall_clock())
        after = forecast.with_requests(before, now, requests) if requests or before.first_day is None else before
        if after != before:
            self._found[spec.name], self._is_dirty = after, True

    def forget(self, endpoint: str) -> None:
        """Forget an endpoint that was deleted."""
        self._is_dirty = self._found.pop(endpoint, None) is not None or self._is_dirty

    async def run(self) -> None:
        """Write what has changed, until cancelled."""
        failure = ReportOnce(self.report)
        while True:
            await asyncio.sleep(self.write_every_s)
            if not self._is_dirty:
                continue
            try:
                await asyncio.to_thread(replace_file, self.path, msgspec.json.encode(self._found), durable=False)
            except StateError as error:
                failure.note(f"the use of endpoints cannot be written: {error}")
            else:
                self._is_dirty = False
                failure.note("")


def local_time(seconds: float) -> datetime:
    """What a clock on the wall shows at a time since 1970, without its zone."""
    return datetime.fromtimestamp(seconds, UTC).astimezone().replace(tzinfo=None)
