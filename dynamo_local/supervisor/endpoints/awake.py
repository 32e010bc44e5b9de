"""Whether an endpoint is to be awake: its idle clock, the orders to park and to wake; and, without a request, its
schedule and a forecast of its use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from dynamo_local.core.endpoints import idling, schedule
from dynamo_local.core.endpoints.checks import runs_differently
from dynamo_local.core.endpoints.idling import Activity, IdleTimes, Idling, Rest, WakeCause
from dynamo_local.core.endpoints.schedule import Schedule, Usage
from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.errors import StateError, SupervisorError
from dynamo_local.core.messages.reports import Event
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
        if spec.forecast and schedule.was_often_used(usage, now):
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
        after = schedule.with_requests(before, now, requests) if requests or before.first_day is None else before
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


@dataclass
class Idleness:
    """The idle clock of one endpoint. `record`: notes what is done to it."""

    spec: EndpointSpec
    clock: Callable[[], float]
    record: Callable[[Event], None]
    kept: Kept = field(default_factory=Kept)
    """Whether it stays awake without a request."""
    state: Idling = field(init=False)
    _cause: WakeCause = field(default="request", init=False)
    """What it was woken by last."""

    def __post_init__(self) -> None:
        self.state = idling.at_start(self.spec, self.clock())

    @property
    def rest(self) -> Rest:
        return self.state.rest

    @property
    def is_waking(self) -> bool:
        """Whether it rested, and no worker is ready since."""
        return self.state.waking_since is not None

    @property
    def failure(self) -> str:
        """Why no request has it started now; empty if one does."""
        return self.state.failure(self.clock())

    @property
    def reason(self) -> str:
        """Why it rests, in words."""
        reason, at = idling.reason(self.state, self.clock()), self.kept.next_at
        return f"{reason}; its schedule does on {at:%A at %H:%M}" if reason and at and not self.kept.awake else reason

    def wake(self, *, asked: bool, kept: Kept | None = None) -> bool:
        """Have it awake; returns whether it was not to be. `kept`: what has it awake without an order. Raises
        SupervisorError to a frontend (`asked`) while a start that has failed is not to be repeated."""
        now, rested = self.clock(), self.state.rest
        if asked and (failure := self.failure):
            raise SupervisorError(
                f"endpoint {self.spec.name} could not be started: {failure}",
                f"a request tries it again in {self.state.may_wake_at - now:.0f} s",
            )
        self.state = idling.woken(self.state, now, asked=asked)
        if rested != "awake":
            self._note_wake(*_woken_by(kept, asked=asked), rested)
        return rested != "awake"

    def order_rest(self, rest: Rest) -> None:
        """Park it, or have it sleep, once no request is under way."""
        self.state = idling.ordered_to_rest(self.state, rest)

    def yield_to(self, other: str) -> None:
        """Have it sleep now: its devices go to the endpoint `other`."""
        self.state = idling.yielded(self.state, other, self.clock())

    def update(self, spec: EndpointSpec) -> None:
        """Follow an update of the endpoint."""
        before, self.spec = self.spec, spec
        anew, rested = runs_differently(before, spec), self.state.rest
        self.state = idling.changed(self.state, before, spec, self.clock(), runs_anew=anew)
        if rested != "awake" and self.state.rest == "awake":
            self._note_wake("update", "woken by an update", rested)

    def look(self, seen: Activity) -> None:
        """Have it rest if it is not used."""
        since, now = self.state.waking_since, self.clock()
        self.state = idling.looked(self.state, self._times, seen, now)
        if since is not None and self.state.waking_since is None and self.state.rest == "awake":
            took_s = round(now - since, 3)
            what = f"awake after {took_s:.2f} s"
            self.record(Event("wake", what, endpoint=self.spec.name, cause=self._cause, took_s=took_s))

    def fail(self, why: str, rest: Rest = "asleep") -> None:
        """Have it rest because it cannot be started."""
        self.state = idling.wake_failed(self.state, why, self.clock(), rest)

    def look_in_s(self, every_s: float) -> float:
        """Time until another look is due, in seconds, at most `every_s`."""
        at, now = idling.look_at(self.state, self._times), self.clock()
        return every_s if at is None or at <= now else min(every_s, at - now)

    def _note_wake(self, cause: WakeCause, what: str, rested: Rest) -> None:
        self._cause = cause
        self.record(Event("wake", what, f"it was {rested}", endpoint=self.spec.name, cause=cause))

    @property
    def _times(self) -> IdleTimes:
        return IdleTimes(None, None) if self.kept.awake else idling.times_of(self.spec)


def _woken_by(kept: Kept | None, *, asked: bool) -> tuple[WakeCause, str]:
    """What an endpoint is woken by, in a word and in words."""
    if kept is None:
        return ("request", "woken by a request") if asked else ("order", "woken by order")
    return kept.cause, f"woken: {kept.awake}" if kept.awake else "woken: by its schedule"
