"""The keeper against a circus that only keeps statuses, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from dynamo_local.core.errors import SupervisorError
from dynamo_local.core.restarts import RestartLimits
from dynamo_local.supervisor.events import ProcessEnded
from dynamo_local.supervisor.keeper import Keeper
from tests.unit.supervisor.recording import RecordingReport

LIMITS = RestartLimits(first_delay_s=1, max_delay_s=4, healthy_after_s=60, max_failed_starts=2)


class FakeCircus:
    def __init__(self, **statuses: str) -> None:
        self.current = dict(statuses)
        self.started: list[str] = []

    async def statuses(self) -> dict[str, str]:
        return dict(self.current)

    async def start(self, name: str) -> None:
        self.started.append(name)
        self.current[name] = "active"


class FakeEvents:
    def __init__(self, *events: ProcessEnded) -> None:
        self._events = list(events)

    async def next(self) -> ProcessEnded:
        if not self._events:
            await asyncio.Event().wait()
        return self._events.pop(0)


class Kept:
    """A keeper, its world, and the time."""

    def __init__(self, directory: Path, wanted: bool = True, quiet: tuple[str, ...] = ()) -> None:
        self.circus = FakeCircus(ns_A="active")
        self.report = RecordingReport()
        self.now = 0.0
        self.deaths: list[tuple[str, int | None]] = []

        async def on_death(name: str, pid: int | None) -> bool:
            self.deaths.append((name, pid))
            return wanted

        self.keeper = Keeper(
            self.circus,
            on_death,
            self.log,
            self.report,
            quiet=quiet,
            limits=LIMITS,
            clock=lambda: self.now,
        )
        self._directory = directory

    def log(self, name: str) -> Path:
        return self._directory / f"{name}.log"

    async def ends(self, exit_code: int | None) -> None:
        self.circus.current["ns_A"] = "stopped"
        events = FakeEvents(ProcessEnded("ns_a", 1, exit_code))
        listening = asyncio.create_task(self.keeper.listen(events))
        await asyncio.sleep(0)
        listening.cancel()

    async def look(self) -> None:
        await self.keeper.look()


Make = Callable[..., Kept]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def kept(wanted: bool = True, quiet: tuple[str, ...] = ()) -> Kept:
        return Kept(tmp_path, wanted, quiet)

    return kept


async def test_a_running_watcher_is_left_alone(make: Make) -> None:
    kept = make()
    await kept.look()
    assert (kept.circus.started, kept.deaths, kept.report.lines) == ([], [], [])


async def test_it_is_started_again_when_its_delay_has_passed_and_not_before(make: Make) -> None:
    kept = make()
    kept.keeper.note_ready("ns_A")
    await kept.ends(-9)
    await kept.look()
    kept.now = 0.9
    await kept.look()
    assert kept.circus.started == []
    kept.now = 1.0
    await kept.look()
    assert kept.circus.started == ["ns_A"]
    assert kept.deaths == [("ns_A", 1)]
    assert kept.report.lines == ["ns_A  ended: killed by SIGKILL, restart in 1 s"]


async def test_one_that_was_stopped_on_purpose_stays_stopped(make: Make) -> None:
    kept = make(wanted=False)
    await kept.ends(0)
    await kept.look()
    kept.now = 100.0
    await kept.look()
    assert kept.circus.started == []
    assert kept.report.lines == []


async def test_an_exit_code_that_is_late_is_waited_for_and_one_that_is_lost_is_not(make: Make) -> None:
    kept = make()
    kept.circus.current["ns_A"] = "stopped"
    await kept.look()
    assert kept.deaths == []
    await kept.look()
    assert kept.deaths == [("ns_A", None)]
    assert kept.report.lines == ["ns_A  ended: exit code not known, restart in 1 s"]


async def test_giving_up_shows_the_log_of_the_last_process_only(make: Make) -> None:
    kept = make()
    kept.log("ns_A").write_text("error: first\n")
    await kept.ends(1)
    await kept.look()
    kept.now = 1.0
    await kept.look()
    with kept.log("ns_A").open("a") as log:
        log.write("about to fail\nerror: second\n")
    await kept.ends(1)
    with pytest.raises(SupervisorError, match=r"ns_A failed to start 2 times \(exit code 1\): second"):
        await kept.look()
    assert kept.report.lines[-2:] == ["    | about to fail", "    | error: second"]


async def test_a_wrong_configuration_is_not_tried_again(make: Make) -> None:
    kept = make()
    await kept.ends(2)
    with pytest.raises(SupervisorError, match=r"ns_A did not start \(exit code 2\)"):
        await kept.look()
    assert kept.circus.started == []


async def test_a_quiet_watcher_is_ready_while_it_runs(make: Make) -> None:
    kept = make(quiet=("ns_A",))
    for deaths in range(1, 5):
        await kept.look()
        await kept.ends(1)
        await kept.look()
        kept.now += 10
        await kept.look()
        assert kept.circus.started == ["ns_A"] * deaths
