"""The restarter with a circus that only keeps statuses, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from dynamo_local.core.errors import StateError, SupervisorError
from dynamo_local.core.messages.reports import Event
from dynamo_local.core.process.restarts import RestartLimits
from dynamo_local.supervisor.circus.client import ProcessBegan, ProcessEnded
from dynamo_local.supervisor.upkeep.restarter import RegisteredProcess, Restarter
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
    def __init__(self, *events: ProcessBegan | ProcessEnded) -> None:
        self._events = list(events)

    async def next(self) -> ProcessBegan | ProcessEnded:
        if not self._events:
            await asyncio.Event().wait()
        return self._events.pop(0)


class Case:
    """A restarter, the fakes around it, and the time."""

    def __init__(
        self, directory: Path, wanted: bool = True, quiet: tuple[str, ...] = (), expendable: tuple[str, ...] = ()
    ) -> None:
        self.circus = FakeCircus(ns_A="active")
        self.report = RecordingReport()
        self.now = 0.0
        self.deaths: list[tuple[str, int | None]] = []
        self.events: list[Event] = []
        self.cleared: list[RegisteredProcess | None] = []
        self.process: RegisteredProcess | None = RegisteredProcess(11, "first")
        self.meanwhile: Callable[[], None] = lambda: None
        self.unreadable = False

        self.is_wanted = wanted
        self.restarter = Restarter(
            self.circus,
            self,
            self.log,
            self.report,
            quiet=quiet,
            expendable=expendable,
            limits=LIMITS,
            clock=lambda: self.now,
            record=self.events.append,
        )
        self._directory = directory

    def log(self, name: str) -> Path:
        return self._directory / f"{name}.log"

    async def registered(self, watcher: str) -> RegisteredProcess | None:
        if self.unreadable:
            raise StateError("cannot read the statefile")
        found = self.process
        self.meanwhile()
        return found

    async def ended(self, watcher: str, pid: int | None, registered: RegisteredProcess | None) -> None:
        self.deaths.append((watcher, pid))
        self.cleared.append(registered)

    async def wanted(self, watcher: str) -> bool:
        if self.unreadable:
            raise StateError("cannot read the statefile")
        return self.is_wanted

    async def told(self, *events: ProcessBegan | ProcessEnded) -> None:
        listening = asyncio.create_task(self.restarter.listen(FakeEvents(*events)))
        await asyncio.sleep(0)
        listening.cancel()

    async def ends(self, exit_code: int | None) -> None:
        self.circus.current["ns_A"] = "stopped"
        await self.told(ProcessEnded("ns_a", 1, exit_code))

    async def look(self) -> None:
        await self.restarter.look()


Make = Callable[..., Case]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def case(wanted: bool = True, quiet: tuple[str, ...] = ()) -> Case:
        return Case(tmp_path, wanted, quiet)

    return case


async def test_a_running_watcher_is_left_alone(make: Make) -> None:
    case = make()
    await case.look()
    assert (case.circus.started, case.deaths, case.report.lines) == ([], [], [])


async def test_it_is_started_again_when_its_delay_has_passed_and_not_before(make: Make) -> None:
    case = make()
    case.restarter.note_ready("ns_A")
    await case.ends(-9)
    await case.look()
    case.now = 0.9
    await case.look()
    assert case.circus.started == []
    case.now = 1.0
    await case.look()
    assert case.circus.started == ["ns_A"]
    assert case.deaths == [("ns_A", 1)]
    assert case.report.lines == ["ns_A  ended: killed by SIGKILL, restart in 1 s"]


async def test_one_that_was_stopped_on_purpose_stays_stopped(make: Make) -> None:
    case = make(wanted=False)
    await case.ends(0)
    await case.look()
    case.now = 100.0
    await case.look()
    assert case.circus.started == []
    assert case.report.lines == []


async def test_one_that_is_to_end_by_now_is_not_started_when_its_delay_has_passed(make: Make) -> None:
    case = make()
    case.restarter.note_ready("ns_A")
    await case.ends(-9)
    await case.look()
    case.is_wanted = False
    case.now = 1.0
    await case.look()
    assert case.circus.started == []


async def test_a_new_watcher_of_a_removed_ones_name_starts_without_its_record(make: Make) -> None:
    case = make()
    for _ in range(2):
        await case.ends(1)
        await case.look()
        case.now += 10
        case.circus.current = {}
        await case.look()
        case.circus.current = {"ns_A": "active"}
        await case.look()
    await case.ends(1)
    await case.look()
    assert case.report.lines[-1] == "ns_A  ended: exit code 1, restart in 1 s"


async def test_the_end_of_an_earlier_process_is_not_taken_for_that_of_the_present_one(make: Make) -> None:
    case = make()
    await case.told(ProcessEnded("ns_a", 1, 2), ProcessBegan("ns_a", 9))
    case.circus.current["ns_A"] = "stopped"
    await case.look()
    assert case.deaths == []
    await case.told(ProcessEnded("ns_a", 9, -9))
    await case.look()
    assert case.deaths == [("ns_A", 9)]


async def test_one_whose_start_failed_is_looked_after_once_it_is_to_run(make: Make) -> None:
    case = make(wanted=False)
    case.restarter.note_ready("ns_A")
    await case.ends(1)
    await case.look()
    case.is_wanted = True
    for _ in range(3):
        await case.look()
        case.now += 10
    assert case.circus.started == ["ns_A"]


async def test_an_exit_code_that_is_late_is_waited_for_and_one_that_is_lost_is_not(make: Make) -> None:
    case = make()
    case.circus.current["ns_A"] = "stopped"
    await case.look()
    assert case.deaths == []
    await case.look()
    assert case.deaths == [("ns_A", None)]
    assert case.report.lines == ["ns_A  ended: exit code not known, restart in 1 s"]


async def test_giving_up_shows_the_log_of_the_last_process_only(make: Make) -> None:
    case = make()
    case.log("ns_A").write_text("error: first\n")
    await case.ends(1)
    await case.look()
    case.now = 1.0
    await case.look()
    with case.log("ns_A").open("a") as log:
        log.write("about to fail\nerror: second\n")
    await case.ends(1)
    with pytest.raises(SupervisorError, match=r"ns_A failed to start 2 times \(exit code 1\): second"):
        await case.look()
    assert case.report.lines[-2:] == ["    | about to fail", "    | error: second"]


async def test_a_wrong_configuration_is_not_tried_again(make: Make) -> None:
    case = make()
    await case.ends(2)
    with pytest.raises(SupervisorError, match=r"ns_A did not start \(exit code 2\)"):
        await case.look()
    assert case.circus.started == []


async def test_what_nothing_depends_on_is_given_up_quietly_and_for_good(tmp_path: Path) -> None:
    case = Case(tmp_path, expendable=("ns_A",))
    await case.ends(2)
    await case.look()
    assert any("going on without it" in line for line in case.report.lines)
    case.now = 1e9
    await case.look()
    assert case.circus.started == []


async def test_an_endpoints_worker_is_given_up_without_ending_the_others(tmp_path: Path) -> None:
    case = Case(tmp_path)
    name = "ns_chat@1_Worker"
    case.circus.current = {name: "stopped"}
    case.log(name).write_text("error: no such model\n")
    await case.told(ProcessEnded(name.lower(), 1, 2))
    await case.look()
    assert case.restarter.given_up.keys() == {name}
    assert "no such model" in case.restarter.given_up[name]
    case.now = 1e9
    await case.look()
    assert case.circus.started == []
    # Its successor of the same name begins anew.
    del case.circus.current[name]
    await case.look()
    assert case.restarter.given_up == {}


async def test_a_quiet_watcher_is_ready_while_it_runs(make: Make) -> None:
    case = make(quiet=("ns_A",))
    for deaths in range(1, 5):
        await case.look()
        await case.ends(1)
        await case.look()
        case.now += 10
        await case.look()
        assert case.circus.started == ["ns_A"] * deaths


@pytest.mark.parametrize("missed", [False, True])
async def test_each_start_of_a_quiet_watcher_is_an_event_also_if_circus_told_of_it_too_early(
    make: Make, missed: bool
) -> None:
    case = make(quiet=("ns_A",))
    for _ in range(2):
        if not missed:
            await case.told(ProcessBegan("ns_a", 7))
        await case.look()
        await case.look()
        await case.ends(-9)
        await case.look()
        case.now += 10
        await case.look()
    assert [event.kind for event in case.events] == ["start", "death"] * 2


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  # the fakes tell nobody
            await asyncio.sleep(0.01)


async def test_an_event_wakes_the_restarter(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The restarter does not wait for its next look."""
    monkeypatch.setattr("dynamo_local.supervisor.upkeep.restarter._IDLE_INTERVAL_S", 3600.0)
    case = make()
    case.now = 100.0
    running = asyncio.create_task(case.restarter.run())
    await asyncio.sleep(0)
    await case.ends(-9)
    await until(lambda: case.deaths)
    case.now = 200.0
    await until(lambda: case.circus.started)
    running.cancel()


async def test_an_end_without_an_event_is_seen_as_well(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo_local.supervisor.upkeep.restarter._IDLE_INTERVAL_S", 0.01)
    case = make()
    running = asyncio.create_task(case.restarter.run())
    await asyncio.sleep(0)
    case.circus.current["ns_A"] = "stopped"
    await until(lambda: case.deaths)
    assert case.deaths == [("ns_A", None)]
    running.cancel()


async def test_the_lease_of_the_ended_process_is_cleared(make: Make) -> None:
    case = make()
    await case.ends(-9)
    await case.look()
    assert (case.deaths, case.cleared) == ([("ns_A", 1)], [RegisteredProcess(11, "first")])


async def test_a_process_started_in_its_place_meanwhile_is_left_alone(make: Make) -> None:
    case = make(wanted=False)
    await case.ends(0)

    def restarted() -> None:
        case.circus.current["ns_A"] = "active"
        case.process = RegisteredProcess(22, "second")

    case.meanwhile = restarted
    await case.look()
    assert (case.deaths, case.cleared) == ([], [])
    # Its own end is noticed as ever.
    case.meanwhile = lambda: None
    await case.look()
    case.is_wanted = True
    await case.ends(-9)
    await case.look()
    assert case.cleared == [RegisteredProcess(22, "second")]


async def test_a_restart_that_somebody_else_made_is_not_made_again(make: Make) -> None:
    case = make()
    case.restarter.note_ready("ns_A")
    await case.ends(-9)
    await case.look()
    case.circus.current["ns_A"] = "active"
    await case.look()
    case.restarter.note_ready("ns_A")
    case.now = 100.0
    await case.ends(-9)
    await case.look()
    # First told as a death of its own.
    assert (len(case.deaths), case.circus.started) == (2, [])


async def test_a_statefile_that_cannot_be_read_only_delays(make: Make) -> None:
    case = make()
    case.restarter.note_ready("ns_A")
    await case.ends(-9)
    case.unreadable = True
    await case.look()
    await case.look()
    assert case.report.lines == [
        "ns_A  ended, and is started again when the statefile can be used: cannot read the statefile"
    ]
    case.unreadable = False
    await case.look()
    case.unreadable = True
    case.now = 1.0
    await case.look()
    assert case.circus.started == []
    case.unreadable = False
    await case.look()
    assert (case.circus.started, case.deaths) == (["ns_A"], [("ns_A", 1)])
    assert case.report.lines[1] == "ns_A  ended: killed by SIGKILL, restart in 1 s"
