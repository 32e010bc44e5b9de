"""Schedules and forecasts of endpoints by a clock on the wall, and what is kept of their use."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path

from dynamo_local.core.endpoints.schedule import Usage
from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.supervisor.endpoints.awake import Keeping, Kept, KeptUsage, local_time
from tests.unit.supervisor.recording import RecordingReport

MONDAY = datetime(2026, 11, 23, 7, 0).astimezone()
FORECAST = EndpointSpec(name="chat", model="m", min_workers=0, forecast=True)


class Clock:
    def __init__(self) -> None:
        self.now = MONDAY

    def __call__(self) -> float:
        return self.now.timestamp()


def test_local_time_is_that_of_a_clock_on_the_wall() -> None:
    assert local_time(MONDAY.timestamp()) == MONDAY.replace(tzinfo=None)


def test_a_range_keeps_awake_and_a_single_time_is_due_once() -> None:
    clock = Clock()
    one = Keeping(clock)
    spec = EndpointSpec(name="chat", model="m", awake=("mon 08:00-09:00", "daily 20:00"))
    found = []
    for hours in (7, 8, 9, 19.99, 20, 20.01):
        clock.now = MONDAY + timedelta(hours=hours - 7)
        found.append(one.look(spec, Usage()))
    day = MONDAY.replace(tzinfo=None, hour=0)
    at_8, at_9, at_20 = (day + timedelta(hours=hour) for hour in (8, 9, 20))
    tomorrow = at_20 + timedelta(days=1)
    assert found == [
        Kept(next_at=at_8),
        Kept("its schedule keeps it awake", next_at=at_9),
        Kept(next_at=at_20),
        Kept(next_at=at_20),
        Kept(due=True, next_at=tomorrow),
        Kept(next_at=tomorrow),
    ]


def test_what_was_used_often_is_expected_by_the_next_server_too(tmp_path: Path) -> None:
    clock, report = Clock(), RecordingReport()
    usage = KeptUsage(tmp_path / "use.json", report, clock, write_every_s=0.01)
    usage.load()
    usage.note(EndpointSpec(name="other", model="m"), 3)
    for day in range(4):
        clock.now = MONDAY + timedelta(days=day)
        usage.note(FORECAST, 2)

    async def write() -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(10):
                task = asyncio.create_task(usage.run())
                while not usage.path.exists():  # noqa: ASYNC110  # nothing tells of it
                    await asyncio.sleep(0.01)
                task.cancel()

    asyncio.run(write())
    again = KeptUsage(usage.path, report, clock)
    again.load()
    assert again.of("chat") == usage.of("chat")
    assert again.of("other") == Usage()
    clock.now = MONDAY + timedelta(days=4)
    assert Keeping(clock).look(FORECAST, again.of("chat")) == Kept("it was often used at this time", cause="forecast")
    again.forget("chat")
    assert Keeping(clock).look(FORECAST, again.of("chat")) == Kept()


def test_a_damaged_file_is_begun_anew(tmp_path: Path) -> None:
    report = RecordingReport()
    usage = KeptUsage(tmp_path / "use.json", report, Clock())
    usage.path.write_text("{")
    usage.load()
    assert usage.of("chat") == Usage()
    assert "is unknown" in report.lines[0]
