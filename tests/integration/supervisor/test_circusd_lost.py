"""circusd dies, or says nothing for long: `dynamo serve` and its services go on. Real circus, NATS and mockers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from state.machine.processes import start_time
from tests.integration.server_process import PATIENCE_S, ServerProcess, eventually
from tests.integration.supervisor.scaled_server import NAMESPACE, ScaledServer
from tests.integration.supervisor.test_restart import TWO_DECODERS, streams

pytestmark = pytest.mark.integration

TAKEN_OVER = "another circusd runs and has"


class Tiny(ServerProcess):
    """A server of tiny services (serve_tiny.py), Front the root."""

    def __init__(self, root: Path, **modes: str) -> None:
        services = [f"{name}={mode}" for name, mode in modes.items()]
        super().__init__(root, "tiny", ["-m", "tests.integration.supervisor.serve_tiny", "tiny", *services, "Front="])

    def all_pids(self) -> dict[str, int]:
        return {name: self.pid(name) for name in ("Nats", "Back", "Front")}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "state"


def killed(server: ServerProcess) -> int:
    """Kill circusd, and wait until another one has taken over. Returns the pid of the one killed."""
    circusd = server.circusd_pid()
    os.kill(circusd, signal.SIGKILL)
    server.line("circusd  ended: killed by SIGKILL; its processes run on")
    server.line(TAKEN_OVER)
    return circusd


def test_a_silent_circusd_is_waited_for_and_one_that_stays_silent_replaced(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINY_CIRCUS_DEADLINES_S", "1 6")
    with Tiny(root, Back="") as tiny:
        tiny.line("all services ready")
        before, circusd = tiny.all_pids(), tiny.circusd_pid()
        os.kill(circusd, signal.SIGSTOP)
        tiny.line("circusd has not answered for", "retrying")
        os.kill(circusd, signal.SIGCONT)
        tiny.line("circusd answers again")
        assert (tiny.all_pids(), tiny.circusd_pid()) == (before, circusd)
        os.kill(circusd, signal.SIGSTOP)
        tiny.line("circusd has not answered for", "it is killed")
        tiny.line(TAKEN_OVER, "the 3 processes that run")
        assert tiny.all_pids() == before
        assert tiny.circusd_pid() != circusd
        os.kill(tiny.circusd_pid(), signal.SIGSTOP)
        tiny.signal(signal.SIGTERM)
        # No longer than until it would have been told of.
        tiny.line("circusd has not answered for", "it is killed")
        tiny.line("stopping without circusd (killed by SIGKILL)")
        assert tiny.end() == 0
        tiny.assert_nothing_left()


def test_a_killed_circusd_is_replaced_and_its_processes_are_looked_after_as_before(root: Path) -> None:
    with Tiny(root, Back="parent") as tiny:
        tiny.line("all services ready")
        before = tiny.all_pids()
        assert len({killed(tiny), killed(tiny), tiny.circusd_pid()}) == 3
        assert tiny.output.count(f"{TAKEN_OVER} the 3 processes that run") == 2
        assert tiny.all_pids() == before
        assert all(start_time(pid) is not None for pid in before.values())
        # What was adopted, then what was started in its place.
        for delay_s in ("0.5", "1"):
            os.kill(tiny.pid("Back"), signal.SIGKILL)
            tiny.line("Back  ended:", f"restart in {delay_s} s")
            tiny.line("Back  ready")
        child = int(tiny.paths.log_file("tiny_Back").read_text().rpartition("child ")[2].split()[0])
        for pid in (tiny.circusd_pid(), tiny.pid("Back")):
            os.kill(pid, signal.SIGKILL)
        tiny.line(TAKEN_OVER, "the 2 processes that run; ended meanwhile: tiny_Back")
        tiny.line("Back  ready")
        assert start_time(child) is None
        eventually(lambda: not zombies(tiny), "a dead orphan is not buried")
        tiny.signal(signal.SIGTERM)
        assert tiny.end() == 0, tiny.output
        tiny.assert_nothing_left()


def zombies(server: ServerProcess) -> list[int]:
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    return [int(pid) for pid in children if start_time(int(pid)) is None]


def test_one_that_cannot_be_started_ends_the_server_in_order(root: Path) -> None:
    with Tiny(root, Back="") as tiny:
        tiny.line("all services ready")
        while tiny.process.poll() is None:
            # Each before it can take over.
            with suppress(AssertionError, OSError):
                os.kill(tiny.circusd_pid(within_s=0), signal.SIGKILL)
            time.sleep(0.01)
        assert tiny.end() == 1
        assert tiny.lines[-1].startswith("error: circusd could not be started 3 times in a row (killed by SIGKILL)")
        for name in ("Back", "Front"):
            # Told to end, not killed.
            assert f"tiny service tiny_{name} ends" in tiny.paths.log_file(f"tiny_{name}").read_text()
        tiny.assert_nothing_left()


def test_one_that_dies_while_services_start_ends_the_server(root: Path) -> None:
    with Tiny(root, Back="") as tiny:
        tiny.line("starting")
        os.kill(tiny.circusd_pid(), signal.SIGKILL)
        assert tiny.end() == 1
        assert tiny.lines[-1].startswith("error: circusd ended unexpectedly (killed by SIGKILL)")
        tiny.assert_nothing_left()


def test_a_stop_while_circusd_is_being_replaced_leaves_nothing(root: Path) -> None:
    with Tiny(root, Back="") as tiny:
        tiny.line("all services ready")
        os.kill(tiny.circusd_pid(), signal.SIGKILL)
        tiny.line("circusd  ended")
        tiny.signal(signal.SIGTERM)
        assert tiny.end() == 0, tiny.output
        tiny.assert_nothing_left()


@pytest.mark.parametrize("adopted", [False, True])
def test_sigkill_of_the_server_ends_what_circusd_has_left(root: Path, adopted: bool) -> None:
    with Tiny(root, Back="") as tiny:
        tiny.line("all services ready")
        os.kill(tiny.circusd_pid(), signal.SIGKILL)
        if adopted:
            tiny.line(TAKEN_OVER)
        tiny.signal(signal.SIGKILL)
        tiny.process.wait()
        eventually(lambda: tiny.processes() == (), "a process outlives the server")


async def test_requests_do_not_notice_and_commands_work_as_ever(tmp_path: Path) -> None:
    """At which moment of a change circusd dies depends on the machine."""

    def shown() -> dict[str, object]:
        return {row["watcher"]: (row["pid"], row["state"], row["lease"]) for row in json.loads(command("ps", "--json"))}

    def command(*arguments: str) -> str:
        code, out, err = server.command(*arguments)
        assert code == 0, err
        return out

    def killed_in_a_change() -> None:
        changing = server.begin("scale", "VllmWorker=3")
        eventually(lambda: not server.settled(), "no change began")
        killed(server)
        _, err = changing.communicate(timeout=PATIENCE_S)
        eventually(server.consistent, "statefile, circus and processes differ")
        # Started, or, if its process was not there yet, taken back: in any case the user was told.
        assert (changing.returncode == 0) == (server.workers().get("VllmWorker_2") is not None), err

    with ScaledServer(tmp_path / "state", "tests.integration.supervisor.roles_graph:Front", *TWO_DECODERS) as server:
        before = await asyncio.to_thread(shown)
        async with streams(server, 16) as frontend:
            await asyncio.to_thread(killed, server)
            assert await asyncio.to_thread(shown) == before
            answered = frontend.results.right
            async with asyncio.timeout(PATIENCE_S):
                while frontend.results.right < answered + 16:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            await asyncio.to_thread(command, "restart", f"{NAMESPACE}_VllmWorker")
            await asyncio.to_thread(command, "scale", "VllmWorker=2")
            await asyncio.to_thread(killed_in_a_change)
        assert "restart in" not in server.output
        await asyncio.to_thread(command, "stop")
        assert server.end() == 0
        server.assert_nothing_left()
