from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dynamo_local.core.errors import StateError
from state.files import make_run_directory, make_sockets, replace_file
from state.locks import ServerLock
from state.machine.processes import Process
from state.paths import StatePaths
from state.statefile.leftovers import clear_leftovers, leftovers
from state.statefile.store import StateStore
from tests.unit.state.builders import disaggregated, python


def environ(**changes: str) -> dict[str, str]:
    return {
        "DYN_NAMESPACE": "dynamo",
        "DYN_WATCHER": "dynamo_VllmWorker_1",
        "DYN_LOCAL_STATE_DIR": "/state",
    } | changes


class TestLeftovers:
    paths = StatePaths(Path("/state"), "dynamo")

    def test_a_process_of_the_namespace_and_root_belongs(self) -> None:
        process = Process(7, 1, environ())
        assert leftovers(self.paths, [process]) == (process,)

    def test_the_default_root_counts(self) -> None:
        process = Process(7, 1, {"DYN_NAMESPACE": "dynamo", "DYN_WATCHER": "dynamo_A", "HOME": "/home/ada"})
        assert leftovers(StatePaths(Path("/home/ada/.dynamo/state"), "dynamo"), [process]) == (process,)
        assert leftovers(self.paths, [process]) == ()

    @pytest.mark.parametrize(
        "others",
        [
            {},
            environ(DYN_NAMESPACE="other"),
            environ(DYN_WATCHER="other_VllmWorker"),
            environ(DYN_NAMESPACE="other", DYN_WATCHER="other_VllmWorker"),
            environ(DYN_LOCAL_STATE_DIR="/elsewhere"),
            environ(DYN_LOCAL_STATE_DIR=""),
            environ(DYN_WATCHER=""),
            {"DYN_NAMESPACE": "dynamo", "DYN_LOCAL_STATE_DIR": "/state"},
            {"DYN_WATCHER": "dynamo_VllmWorker", "DYN_LOCAL_STATE_DIR": "/state"},
        ],
    )
    def test_nobody_elses_does(self, others: dict[str, str]) -> None:
        assert leftovers(self.paths, [Process(7, 1, others)]) == ()


@dataclass
class FakeProcesses:
    """Processes that end when told to, but for the stubborn. `started`: new ones after each round."""

    running: list[Process] = field(default_factory=list)
    stubborn: Collection[int] = ()
    started: list[list[Process]] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)

    def snapshot(self) -> tuple[Process, ...]:
        return tuple(self.running)

    def end(self, processes: Collection[Process], term_s: float, kill_s: float) -> tuple[Process, ...]:
        assert term_s > 0
        assert kill_s > 0
        self.ended += [process.pid for process in processes]
        self.running = [p for p in self.running if p.pid not in self.ended]
        self.running += self.started.pop(0) if self.started else []
        return tuple(process for process in processes if process.pid in self.stubborn)


@pytest.fixture
def paths(tmp_path: Path) -> StatePaths:
    return StatePaths(tmp_path / "state", "dynamo")


@pytest.fixture
def crashed(paths: StatePaths) -> FakeProcesses:
    """The remains of a killed server: statefile, run directory, a process. Another server's process runs beside."""
    make_run_directory(paths)
    replace_file(paths.bus_file, b"{}")
    replace_file(paths.log_file("dynamo_Frontend"), b"lines")
    StateStore(paths).create(disaggregated())
    ours = Process(7, 1, environ(DYN_LOCAL_STATE_DIR=str(paths.root)))
    return FakeProcesses([ours, Process(8, 1, environ())])


def rest(paths: StatePaths) -> set[str]:
    return {path.name for path in paths.root.iterdir()}


class TestClearLeftovers:
    def test_everything_goes_but_the_logs(self, paths: StatePaths, crashed: FakeProcesses) -> None:
        with ServerLock(paths) as lock:
            notes = clear_leftovers(lock, crashed)
        assert crashed.ended == [7]
        assert rest(paths) == {"dynamo.logs"}
        assert paths.log_file("dynamo_Frontend").exists()
        assert [note.split(":")[0] for note in notes] == [
            "ended process 7 (dynamo_VllmWorker_1), left by a crashed server",
            "removed the statefile of a crashed server",
            "removed the run directory of a crashed server",
        ]

    def test_a_second_time_finds_nothing(self, paths: StatePaths, crashed: FakeProcesses) -> None:
        with ServerLock(paths) as lock:
            clear_leftovers(lock, crashed)
            assert clear_leftovers(lock, FakeProcesses()) == ()

    def test_a_clean_start_finds_nothing(self, paths: StatePaths) -> None:
        with ServerLock(paths) as lock:
            assert clear_leftovers(lock, FakeProcesses()) == ()
        assert rest(paths) == set()

    def test_another_namespace_is_left_alone(self, paths: StatePaths, crashed: FakeProcesses) -> None:
        before = rest(paths)
        with ServerLock(StatePaths(paths.root, "other")) as lock:
            assert clear_leftovers(lock, crashed) == ()
        assert rest(paths) == before
        assert crashed.ended == []

    def test_without_the_server_lock_nothing_is_touched(self, paths: StatePaths, crashed: FakeProcesses) -> None:
        with pytest.raises(StateError, match="under the server lock"):
            clear_leftovers(ServerLock(paths), crashed)
        assert crashed.ended == []
        assert StateStore(paths).read() == disaggregated()

    def test_a_process_that_cannot_be_ended_keeps_its_claim(self, paths: StatePaths, crashed: FakeProcesses) -> None:
        crashed.stubborn = [7]
        with ServerLock(paths) as lock, pytest.raises(StateError, match="cannot be ended: 7"):
            clear_leftovers(lock, crashed)
        assert StateStore(paths).read() == disaggregated()
        assert paths.bus_file.exists()

    def test_what_is_started_meanwhile_ends_too(self, paths: StatePaths, crashed: FakeProcesses) -> None:
        crashed.started = [[dataclasses.replace(crashed.running[0], pid=9)]]
        with ServerLock(paths) as lock:
            clear_leftovers(lock, crashed)
        assert crashed.ended == [7, 9]

    def test_what_keeps_coming_back_is_an_error(self, paths: StatePaths, crashed: FakeProcesses) -> None:
        crashed.started = [[dataclasses.replace(crashed.running[0], pid=pid)] for pid in range(10, 30)]
        with ServerLock(paths) as lock, pytest.raises(StateError, match="cannot be ended"):
            clear_leftovers(lock, crashed)
        assert StateStore(paths).read() == disaggregated()

    def test_an_unreadable_statefile_is_set_aside(self, paths: StatePaths, crashed: FakeProcesses) -> None:
        paths.statefile.write_bytes(b"{")
        with ServerLock(paths) as lock:
            notes = clear_leftovers(lock, crashed)
        assert any("set an unreadable statefile aside" in note for note in notes)
        assert rest(paths) == {"dynamo.logs", "dynamo.json.unreadable"}
        assert crashed.ended == [7]

    @pytest.mark.parametrize("statefile", [None, b"{"])
    def test_sockets_elsewhere_are_found_without_a_statefile(self, tmp_path: Path, statefile: bytes | None) -> None:
        paths = StatePaths(tmp_path / ("deep" * 20), "dynamo")
        make_run_directory(paths)
        with tempfile.TemporaryDirectory(prefix="dyn") as temporary:
            make_sockets(paths, Path(temporary)).circus.touch()
            if statefile is not None:
                paths.statefile.write_bytes(statefile)
            with ServerLock(paths) as lock:
                assert clear_leftovers(lock, FakeProcesses()) != ()
            assert list(Path(temporary).iterdir()) == []

    def test_real_processes_of_another_root_live_on(self, paths: StatePaths) -> None:
        code = "print('ready', flush=True); input()"
        mine = environ(DYN_LOCAL_STATE_DIR=str(paths.root))
        theirs = environ(DYN_LOCAL_STATE_DIR=str(paths.root / "theirs"))
        with python(code, mine) as leftover, python(code, theirs) as bystander:
            with ServerLock(paths) as lock:
                notes = clear_leftovers(lock)
            assert leftover.wait() == -15
            assert bystander.poll() is None
        assert len(notes) == 1
