"""Services forked from a fork server, with real circus and NATS: like services that start by themselves."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from dynamo_local.core.names import WATCHER_ENV
from dynamo_local.process.forkserver.protocol import IMPORTED_ENV, SPARE_MODULE
from state.machine.processes import start_time
from tests.chaos.processes import command_of
from tests.integration.server_process import PATIENCE_S, ServerProcess, eventually, parent_of

pytestmark = pytest.mark.integration

COMMAND = ["-m", "dynamo_local.cli.main"]
FORKSERVER = "forks_ForkServer"


class ForkingServer(ServerProcess):
    """`dynamo serve` of forked_graph.py."""

    def __init__(self, root: Path, *options: str, imports: bool = True) -> None:
        target = "tests.integration.process.forked_graph:Forked"
        arguments = [*COMMAND, "serve", target, "--port=0", "--namespace=forks", *options]
        super().__init__(root, "forks", arguments, imports=imports)

    def log(self, watcher: str = "forks_Forked") -> str:
        return self.paths.log_file(watcher).read_text()

    def imports(self) -> int:
        """How often a fork server has imported."""
        return len(re.findall(r"^imported ", self.log(FORKSERVER), re.MULTILINE))

    def forkserver(self) -> int:
        """The pid of the fork server: the spare has forked it, or circus has started it."""
        spare = self.spare()
        marked = [each.pid for each in self.processes() if each.environ[WATCHER_ENV] == FORKSERVER]
        started = (pid for pid in marked if parent_of(pid) not in marked and pid != spare)
        return next(iter(self._forks_of(spare) or started))

    def _forks_of(self, spare: int) -> set[int]:
        return {each.pid for each in self.processes() if parent_of(each.pid) == spare}

    def spare(self, other_than: int | None = None) -> int:
        """The pid of the spare, once it can be asked."""
        found: list[int] = []

        def there() -> bool:
            found[:] = [each.pid for each in self.processes() if SPARE_MODULE.encode() in command_of(each.pid)]
            return self.paths.spare_socket.exists() and len(found) == 1 and found[0] != other_than

        eventually(there, f"there is no spare:\n{self.log(FORKSERVER)}")
        return found[0]

    def launcher(self) -> int:
        """The pid of the launcher, which circus started."""
        found = [each.pid for each in self.processes() if b"forkserver.launcher" in command_of(each.pid)]
        assert len(found) == 1
        return found[0]

    def next_forkserver(self, before: int) -> int:
        """Wait for the fork server that the spare is forked for after the end of that one; returns its pid."""
        self.line("ForkServer  ", "restart in")
        spare = self.spare()
        eventually(lambda: bool(self._forks_of(spare) - {before}), f"not started again:\n{self.log(FORKSERVER)}")
        return self.forkserver()

    def await_other(self, before: int) -> int:
        """Wait for another process of the service, ready; returns its pid."""

        def another() -> bool:
            pid = self.state().components["forks_Forked"].pid
            return pid not in (None, before)

        eventually(another, f"not started again:\n{self.log()}")
        return self.pid("Forked")


def started(root: Path, *options: str) -> ForkingServer:
    server = ForkingServer(root, *options)
    server.line("all services ready")
    return server


def ended(pid: int) -> None:
    eventually(lambda: start_time(pid) is None, f"process {pid} did not end")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "state"


def test_a_service_is_forked_and_looks_like_itself(root: Path) -> None:
    options = ("--Forked.ServiceArgs.envs.READ_LATER=its-own", "--Forked.ServiceArgs.envs.DYN_TEST_MARK=too")
    with started(root, *options) as server:
        pid, forkserver = server.pid("Forked"), server.forkserver()
        assert parent_of(pid) == forkserver
        assert f"pid {pid} importer {forkserver}" in server.log()
        assert "{'READ_LATER': 'its-own', 'SET_AT_IMPORT': 'yes', 'DYN_TEST_MARK': 'too'}" in server.log()
        marks = {each.pid: each.environ[WATCHER_ENV] for each in server.processes()}
        assert marks[pid] == marks[server.launcher()] == "forks_Forked"
        assert b"dynamo_local.process.main" in command_of(pid)
        assert os.getpgid(pid) == pid
        assert os.getsid(pid) == os.getsid(server.launcher()), "it shares cores with the others as one of them"
        (row,) = [row for row in ps(server) if row["component"] == "Forked"]
        assert (row["state"], row["pid"]) == ("ready", pid)
        server.signal(signal.SIGTERM)
        assert server.end() == 0
        assert "ends in order" in server.log()
        assert "Forked  ended" not in server.output
        server.assert_nothing_left()


def ps(server: ForkingServer) -> list[dict[str, object]]:
    command = [sys.executable, *COMMAND, "ps", "--json", "--namespace=forks"]
    shown = subprocess.run(
        command, env=dict(server.environ), capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    rows: list[dict[str, object]] = json.loads(shown.stdout)
    return rows


def test_neither_the_service_nor_its_launcher_outlives_the_other(root: Path) -> None:
    with started(root) as server:
        first, launcher = server.pid("Forked"), server.launcher()
        os.kill(launcher, signal.SIGKILL)
        ended(first)
        second = server.await_other(first)
        launcher = server.launcher()
        os.kill(second, signal.SIGKILL)
        ended(launcher)
        server.line("Forked  ", "ended: killed by SIGKILL")
        third = server.await_other(second)
        os.kill(server.launcher(), signal.SIGTERM)
        server.line("Forked  ", "ended: exit code 0")
        assert parent_of(server.await_other(third)) == server.forkserver()


def test_forks_outlive_the_forkserver_and_the_next_one_imports_nothing(root: Path) -> None:
    with started(root) as server:
        first, forkserver, spare = server.pid("Forked"), server.forkserver(), server.spare()
        assert parent_of(spare) == forkserver
        os.kill(forkserver, signal.SIGKILL)
        second = server.next_forkserver(forkserver)
        assert parent_of(second) == spare
        assert start_time(first) is not None
        assert server.pid("Forked") == first
        # The one that forked it is gone, and cannot tell how it ends.
        os.kill(first, signal.SIGTERM)
        server.line("Forked  ", "ended: exit code 0")
        another = server.await_other(first)
        assert parent_of(another) == second
        eventually(lambda: f"pid {another} importer {forkserver}" in server.log(), "it has imported by itself")
        # Another circusd takes over the fork server that there is, and not the spare, which is older.
        os.kill(server.circusd_pid(), signal.SIGKILL)
        server.line("another circusd runs")
        os.kill(second, signal.SIGKILL)
        assert parent_of(server.next_forkserver(second)) == spare
        server.signal(signal.SIGTERM)
        assert server.end() == 0
        server.assert_nothing_left()


def test_a_spare_that_ends_is_made_again(root: Path) -> None:
    with started(root) as server:
        forkserver, spare = server.forkserver(), server.spare()
        os.kill(spare, signal.SIGKILL)
        second = server.spare(other_than=spare)
        assert parent_of(second) == forkserver
        # Made by a fork server that was forked from the one before.
        os.kill(forkserver, signal.SIGKILL)
        forkserver = server.next_forkserver(forkserver)
        os.kill(second, signal.SIGKILL)
        third = server.spare(other_than=second)
        assert parent_of(third) == forkserver
        for each in (third, forkserver):
            os.kill(each, signal.SIGSTOP)
        # Without either, all is imported anew.
        for each in (third, forkserver):
            os.kill(each, signal.SIGKILL)
        eventually(lambda: server.imports() == 2, "nothing was imported anew")
        assert server.spare(other_than=third)


def test_sigkill_of_the_server_leaves_no_process(root: Path) -> None:
    with started(root) as server:
        server.signal(signal.SIGKILL)
        server.process.wait()
        eventually(lambda: server.processes() == (), "a process outlives the server")
    with started(root) as server:
        assert "removed the statefile of a crashed server" in server.output


def test_forks_that_a_crash_left_are_found(root: Path) -> None:
    with started(root) as server:
        pid = server.pid("Forked")
        # Stopped, it cannot follow anything; all that it hangs on goes at once.
        os.kill(pid, signal.SIGSTOP)
        for each in (server.process.pid, server.circusd_pid(), server.launcher(), server.forkserver()):
            # Some of them die with the first.
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        ended(pid)
        server.process.wait()


def test_fork_servers_of_tests_are_forked_from_one_that_has_imported(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    socket = tmp_path / "imported.sock"
    monkeypatch.setenv(IMPORTED_ENV, str(socket))
    preload = "tests.integration.process.slow_import"
    with subprocess.Popen([sys.executable, "-m", "tests.imported", str(socket), preload]) as imported:
        try:
            eventually(socket.exists, "it imports for ever")
            with ForkingServer(root, imports=False) as server:
                server.line("all services ready")
                (forkserver,) = {each.pid for each in server.processes() if parent_of(each.pid) == imported.pid}
                assert parent_of(server.pid("Forked")) == forkserver
                assert f"importer {imported.pid} " in server.log()
                server.signal(signal.SIGTERM)
                assert server.end() == 0
                server.assert_nothing_left()
        finally:
            imported.kill()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--Forked.ServiceArgs.envs.READ_EARLY=x",), r"warning: .* differs in READ_EARLY"),
        (("--no-forkserver",), r"^pid (\d+) importer \1 "),
    ],
)
def test_without_a_fork_the_service_imports_by_itself(root: Path, options: tuple[str, ...], says: str) -> None:
    with started(root, *options) as server:
        pid = server.pid("Forked")
        assert f"pid {pid} importer {pid}" in server.log()
        assert re.search(says, server.log(), re.MULTILINE)
        assert parent_of(pid) == server.circusd_pid()
        assert server.paths.log_file(FORKSERVER).exists() == ("--no-forkserver" not in options)


def test_an_import_that_fails_costs_no_service(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_TEST_BREAK_IMPORT", "1")
    with ForkingServer(root) as server:
        # The service itself imports it, too, and cannot; what matters is that it came to try.
        server.line("ImportError: nothing here", within_s=PATIENCE_S)
        # The fork server, which imports it as well, may have said so first.
        eventually(lambda: "warning: the fork server forks nothing" in server.log(), "the service did not try")
        server.signal(signal.SIGTERM)
        server.end()
        server.assert_nothing_left()


def test_why_a_forked_service_does_not_start_is_told(root: Path) -> None:
    with ForkingServer(root, "--Forked.ServiceArgs.envs.DYN_TEST_FAILS=1") as server:
        assert server.end() == 1
        assert "forks_Forked did not start (exit code 2): no such thing; name another" in server.output
        server.assert_nothing_left()
