"""`dynamo serve` from outside, with real circus, real NATS and tiny services: nothing may be left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

from dynamo_local.bus.address import BusAddress
from state.machine.processes import start_time
from tests.integration.server_process import PATIENCE_S, ServerProcess, eventually

pytestmark = pytest.mark.integration


class Tiny(ServerProcess):
    """A server of tiny services, the root last."""

    def __init__(self, root: Path, *services: str) -> None:
        super().__init__(root, "tiny", ["-m", "tests.integration.supervisor.serve_tiny", "tiny", *services])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "state"


def child_of(server: Tiny) -> int:
    """Pid of the child that a service in the mode "parent" has told of."""
    text = server.paths.log_file("tiny_Back").read_text()
    return int(text.partition("child ")[2].split()[0])


def started(root: Path, *services: str) -> Tiny:
    server = Tiny(root, *(services or ("Back=", "Front=")))
    server.line("all services ready")
    return server


IGNORED = pytest.mark.skipif(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, reason="ignored here, as by nohup")


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, signal.SIGTERM, pytest.param(signal.SIGHUP, marks=IGNORED)],
    ids=lambda number: number.name,
)
def test_a_signal_ends_everything_in_order_and_leaves_nothing(root: Path, number: signal.Signals) -> None:
    with started(root) as server:
        server.signal(number)
        assert server.end() == 0
        server.assert_nothing_left()


def test_the_root_goes_first_and_the_bus_last(root: Path) -> None:
    with started(root) as server:
        logs = server.paths.logs_dir
        server.signal(signal.SIGTERM)
        server.end()
        ended = {name: (logs / f"tiny_{name}.log").stat().st_mtime_ns for name in ("Front", "Back", "Nats")}
        assert sorted(ended, key=ended.__getitem__) == ["Front", "Back", "Nats"]


def test_sigkill_leaves_no_process_and_the_next_server_clears_the_rest(root: Path) -> None:
    with started(root) as server:
        circusd = server.circusd_pid()
        server.signal(signal.SIGKILL)
        server.process.wait()
        eventually(lambda: start_time(circusd) is None, "circusd outlives its parent")
        eventually(lambda: server.processes() == (), "a process outlives the server")
        assert server.paths.statefile.exists()
    with started(root) as server:
        assert "removed the statefile of a crashed server" in server.output
        server.signal(signal.SIGTERM)
        assert server.end() == 0
        server.assert_nothing_left()


def test_what_a_service_has_forked_ends_with_it(root: Path) -> None:
    with started(root, "Back=parent", "Front=") as server:
        child = child_of(server)
        assert start_time(child) is not None
        server.signal(signal.SIGTERM)
        assert server.end() == 0
        assert start_time(child) is None
        server.assert_nothing_left()


def test_a_service_that_ignores_sigterm_is_killed_at_its_deadline(root: Path) -> None:
    with started(root, "Back=stubborn", "Front=") as server:
        server.signal(signal.SIGTERM)
        assert server.end() == 0
        assert "Back  does not end by itself, killing it" in server.output
        server.assert_nothing_left()


def test_ctrl_c_before_the_server_is_ready_is_an_interruption(root: Path) -> None:
    with Tiny(root, "Back=slow", "Front=") as server:
        server.line("Back (warming up)")
        server.signal(signal.SIGINT)
        server.line("Ctrl-C: stopping what has been started")
        assert server.end() == 130
        server.assert_nothing_left()


def test_a_second_signal_does_not_wait(root: Path) -> None:
    with started(root, "Back=stubborn", "Front=") as server:
        server.signal(signal.SIGINT)
        server.line("Ctrl-C: finishing the requests in flight")
        server.signal(signal.SIGINT)
        server.line("Ctrl-C again")
        assert server.end() == 0
        server.assert_nothing_left()


def test_a_service_that_dies_is_started_again(root: Path) -> None:
    with started(root) as server:
        before = server.state().components["tiny_Back"]
        os.kill(server.pid("Back"), signal.SIGKILL)
        server.line("Back  ", "restart in 0.5 s")
        server.line("Back  ready")
        server.pid("Back")
        after = server.state().components["tiny_Back"]
        assert (after.devices, after.cmd) == (before.devices, before.cmd)
        assert after.lease not in (None, before.lease)
        os.kill(server.pid("Back"), signal.SIGKILL)
        server.line("Back  ", "restart in 1 s")


def test_nats_comes_back_where_it_was(root: Path) -> None:
    with started(root) as server:
        address = server.paths.bus_file.read_bytes()
        os.kill(server.pid("Nats"), signal.SIGKILL)
        server.line("Nats  ", "restart in")
        # Reaches the supervisor over the same address or not at all.
        os.kill(server.pid("Back"), signal.SIGKILL)
        server.line("Back  ready")
        assert server.paths.bus_file.read_bytes() == address


def test_a_misconfigured_service_is_told_at_once_and_ends_the_server(root: Path) -> None:
    with Tiny(root, "Back=misconfigured", "Front=") as server:
        assert server.end() == 1
        error = server.lines[-1]
        assert error.startswith("error: tiny_Back did not start (exit code 2): no such model; name another;")
        assert "    | error: no such model; name another" in server.lines
        server.assert_nothing_left()


def test_a_service_that_cannot_start_is_given_up(root: Path) -> None:
    with Tiny(root, "Back=crash", "Front=") as server:
        assert server.end() == 1
        assert server.output.count("Back  ended: exit code 1, restart in") == 2
        error = "error: tiny_Back failed to start 3 times (exit code 1): cannot open the device;"
        assert server.lines[-1].startswith(error)
        server.assert_nothing_left()


def test_a_second_server_in_the_namespace_is_refused_and_harms_nothing(root: Path) -> None:
    with started(root) as server:
        with Tiny(root, "Back=", "Front=") as second:
            assert second.end() == 2
            assert f"a server already runs in namespace tiny (pid {server.process.pid})" in second.lines[-1]
        assert server.state().owner.pid == server.process.pid
        server.signal(signal.SIGTERM)
        assert server.end() == 0


def test_a_signal_while_services_come_up_leaves_nothing(root: Path) -> None:
    with Tiny(root, "Back=slow", "Front=") as server:
        server.line("Back (warming up)")
        server.signal(signal.SIGTERM)
        assert server.end() == 0
        server.assert_nothing_left()


def test_a_signal_during_the_clean_up_of_a_failed_start_changes_nothing(
    root: Path,
) -> None:
    with Tiny(root, "Other=stubborn", "Back=crash", "Front=") as server:
        server.line("failed to start 3 times")
        server.signal(signal.SIGTERM)
        assert server.end() == 1
        assert server.lines[-1].startswith("error: tiny_Back failed to start")
        server.assert_nothing_left()


def test_sockets_move_to_a_short_directory_when_the_state_lies_deep(tmp_path: Path) -> None:
    root = tmp_path / ("deep" * 20)
    with started(root) as server:
        sockets = Path(server.state().circus_endpoint.removeprefix("ipc://")).parent
        assert not sockets.is_relative_to(root)
        assert sockets.stat().st_mode & 0o777 == 0o700
        server.signal(signal.SIGTERM)
        assert server.end() == 0
        assert not sockets.exists()
        server.assert_nothing_left()


@pytest.mark.parametrize("by", ["serve", "stop"])
def test_sockets_of_a_server_that_was_killed_are_cleared_away(tmp_path: Path, by: str) -> None:
    root = tmp_path / ("deep" * 20)
    with started(root) as killed:
        killed.signal(signal.SIGKILL)
        killed.process.wait()
        eventually(lambda: killed.processes() == (), "a process outlives the server")
        assert len(killed.socket_directories()) == 1
        if by == "serve":
            with started(root) as server:
                server.signal(signal.SIGTERM)
                assert server.end() == 0
        else:
            stop = [sys.executable, "-m", "dynamo_local.cli.main", "stop", "--namespace", killed.paths.namespace]
            subprocess.run(stop, env=dict(killed.environ), check=True, capture_output=True)
        killed.assert_nothing_left()


def test_the_token_of_the_bus_is_in_no_command_line_no_environment_and_no_log(root: Path) -> None:
    with started(root) as server:
        token = server.paths.bus_file.read_text().split('"token":"')[1].split('"')[0]
        assert len(token) > 30
        for process in (*server.processes(),):
            with suppress(FileNotFoundError):
                command = Path(f"/proc/{process.pid}/cmdline").read_text()
                assert token not in command
                assert token not in str(process.environ)
        assert token not in server.paths.statefile.read_text()
        server.signal(signal.SIGTERM)
        server.end()
        assert token not in server.output
        assert not any(token in path.read_text() for path in server.paths.logs_dir.iterdir())


def test_files_are_private(root: Path) -> None:
    with started(root) as server:
        paths = server.paths
        files = [*paths.run_dir.glob("*.*"), *paths.logs_dir.iterdir(), paths.statefile, paths.nats_config]
        open_to_others = [path for path in files if path.is_file() and path.stat().st_mode & 0o077]
        assert open_to_others == []
        for directory in (paths.run_dir, paths.logs_dir, paths.nats_dir):
            assert directory.stat().st_mode & 0o777 == 0o700


def test_ctrl_c_in_a_terminal_reaches_only_dynamo_serve(root: Path) -> None:
    with started(root) as server:
        # A terminal signals the whole foreground process group.
        os.killpg(server.process.pid, signal.SIGINT)
        server.line("Ctrl-C: finishing the requests in flight")
        assert server.end() == 0
        assert "Got signal" not in server.paths.log_file("circusd").read_text()
        server.assert_nothing_left()


def test_what_a_dead_service_has_forked_is_ended(root: Path) -> None:
    with started(root, "Back=parent", "Front=") as server:
        child = child_of(server)
        os.kill(server.pid("Back"), signal.SIGKILL)
        server.line("Back  ", "restart in 0.5 s")
        eventually(lambda: start_time(child) is None, "a child of a dead service lives on")


# The whole command, with the example.


class Hello(ServerProcess):
    """`dynamo serve` of the example. `dynamo` runs other commands against it."""

    def __init__(self, root: Path, *options: str, namespace: str = "hello") -> None:
        command = ["-m", "dynamo_local.cli.main", "serve", "examples.hello_world.hello_world:Frontend"]
        super().__init__(root, namespace, [*command, f"--namespace={namespace}", "--port=0", *options])

    def await_api(self) -> str:
        """The line that says that the API is ready; its URL."""
        return self.line("API ready at").split()[3]

    def dynamo(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "dynamo_local.cli.main", *arguments, "--namespace=hello"]
        return subprocess.run(
            command, env=self.environ, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )


def generate(url: str) -> list[str]:
    with urllib.request.urlopen(f"{url}/generate?text=good+day", timeout=PATIENCE_S) as answer:
        text: str = answer.read().decode()
    return text.splitlines()


def test_hello_world_from_serve_to_stop(root: Path) -> None:
    with Hello(root, "--Middle.ServiceArgs.workers=2") as server:
        url = server.await_api()
        assert generate(url) == ["Frontend: Middle: Backend: good", "Frontend: Middle: Backend: day-mid"]
        rows = json.loads(server.dynamo("ps", "--json").stdout)
        assert [row["watcher"] for row in rows] == [
            "hello_Nats",
            "hello_Backend",
            "hello_Middle",
            "hello_Middle_1",
            "hello_Frontend",
        ]
        assert {row["state"] for row in rows} == {"ready"}
        assert len({row["pid"] for row in rows}) == 5
        assert {row["role"] for row in rows} == {"bus", "service"}
        assert rows[-1]["url"] == url
        stopped = server.dynamo("stop")
        assert (stopped.returncode, stopped.stdout.splitlines()[-1].split()[-1]) == (0, "stopped")
        assert server.end() == 0
        server.assert_nothing_left()
        assert server.dynamo("ps").returncode == 2


def test_hello_world_leaves_no_process_when_serve_is_killed_and_stop_clears_the_rest(root: Path) -> None:
    with Hello(root) as server:
        server.await_api()
        assert len(server.processes()) == 4
        server.signal(signal.SIGKILL)
        server.process.wait()
        eventually(lambda: server.processes() == (), "a process outlives the server")
        refused = server.dynamo("ps")
        assert refused.returncode == 2
        assert "one that crashed left files" in refused.stderr
        assert server.dynamo("stop").returncode == 0
        server.assert_nothing_left()


def test_hello_world_answers_again_after_a_service_was_killed(root: Path) -> None:
    with Hello(root) as server:
        url = server.await_api()
        os.kill(server.pid("Middle"), signal.SIGKILL)
        server.line("Middle  ", "restart in")
        (middle,) = [row for row in json.loads(server.dynamo("ps", "--json").stdout) if row["component"] == "Middle"]
        assert middle["state"] != "ready" or middle["pid"] is not None
        server.line("Middle  ready")
        assert generate(url)[0] == "Frontend: Middle: Backend: good"


def test_the_logs_of_hello_world_are_there_during_and_after(root: Path) -> None:
    with Hello(root) as server:
        server.await_api()
        assert "Server is ready" in server.dynamo("logs", "Nats").stdout
        follower = subprocess.Popen(
            [sys.executable, "-m", "dynamo_local.cli.main", "logs", "Nats", "-f", "--namespace=hello"],
            env=server.environ,
            stdout=subprocess.PIPE,
            text=True,
        )
        server.signal(signal.SIGTERM)
        followed, _ = follower.communicate(timeout=PATIENCE_S)
        assert follower.returncode == 0
        assert "Server Exiting" in followed
        server.end()
        assert "Server Exiting" in server.dynamo("logs", "Nats").stdout


def test_a_nats_server_of_somebody_else_is_used_and_left_alone(root: Path, tmp_path: Path) -> None:
    with Hello(tmp_path / "other") as other:
        other.await_api()
        address = BusAddress.load(other.paths.bus_file)
        secret_url = address.url.replace("nats://", f"nats://{address.user}:{address.token}@")
        with Hello(root, f"--nats-url={secret_url}") as second:
            assert second.end() == 2
            assert second.lines[-1].startswith("error: namespace hello on this bus belongs to a server on ")
        with Hello(root, f"--nats-url={secret_url}", namespace="second") as server:
            url = server.await_api()
            assert generate(url)[0] == "Frontend: Middle: Backend: good"
            assert "second_Nats" not in server.state().components
            assert f"using the NATS server at {address.url}" in server.output
            assert address.token is not None
            assert address.token not in server.output
            server.signal(signal.SIGTERM)
            assert server.end() == 0
        assert other.process.poll() is None


def test_a_nats_server_that_is_not_there_is_told_before_anything_starts(root: Path) -> None:
    with Hello(root, "--nats-url=nats://user:hush@127.0.0.1:1") as server:
        assert server.end() == 1
        assert server.lines[-1].startswith("error: cannot connect to NATS")
        assert "hush" not in server.output
        assert list(root.iterdir()) == []
