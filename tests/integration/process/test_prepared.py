"""Prepared processes with real circus: made as ordered, forked for the workers concerned, gone with their reason."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from dynamo_local.core.names import Watcher
from dynamo_local.process.forkserver.prepared.orders import PreparedOrder, withdraw, write_order
from state.machine.processes import start_time
from tests.chaos.processes import command_of
from tests.integration.process.test_forkserver import FORKSERVER, ForkingServer, ended, started
from tests.integration.server_process import eventually, parent_of

pytestmark = pytest.mark.integration

WATCHER = Watcher("forks", "Forked")
TITLE = b"forkserver.prepared.process"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "state"


def order(server: ForkingServer, key: str, recipe: str = "some", weight_bytes: int = 0) -> None:
    module = "tests.integration.process.fake_weights"
    write_order(server.paths, WATCHER, PreparedOrder(key, module, recipe.encode(), weight_bytes, 0))


def made(server: ForkingServer, key: str, other_than: int | None = None) -> int:
    """The pid of the process with these weights, once it can be asked."""

    def there() -> bool:
        return server.paths.prepared_socket(key).exists() and _pid_of(server, key) not in (None, other_than)

    eventually(there, f"no process has loaded the weights:\n{server.log(FORKSERVER)}")
    pid = _pid_of(server, key)
    assert pid is not None
    return pid


def _pid_of(server: ForkingServer, key: str) -> int | None:
    found = [each.pid for each in server.processes()]
    return next((pid for pid in found if TITLE in (text := command_of(pid)) and key.encode() in text), None)


def says(server: ForkingServer, pattern: str, watcher: str = FORKSERVER) -> None:
    eventually(lambda: re.search(pattern, server.log(watcher)) is not None, f"nobody says {pattern!r}")


def test_a_worker_that_is_started_again_has_the_weights(root: Path) -> None:
    with started(root) as server:
        first = server.pid("Forked")
        says(server, f"pid {first} weights None", str(WATCHER))
        order(server, "k1")
        prepared = made(server, "k1")
        assert parent_of(prepared) == server.forkserver()
        os.kill(first, signal.SIGKILL)
        second = server.await_other(first)
        assert parent_of(second) == prepared
        says(server, rf"pid {second} weights \({prepared}, 'some'\)", str(WATCHER))
        assert os.getpgid(second) == second
        # Its end is told as that of any other, and its own launcher takes it along.
        os.kill(second, signal.SIGTERM)
        server.line("Forked  ", "ended: exit code 0")
        third = server.await_other(second)
        os.kill(server.launcher(), signal.SIGKILL)
        ended(third)
        fourth = server.await_other(third)
        assert parent_of(fourth) == prepared
        server.signal(signal.SIGTERM)
        assert server.end() == 0
        server.assert_nothing_left()


def test_a_killed_one_is_made_again_and_its_forks_live_on(root: Path) -> None:
    with started(root) as server:
        first = server.pid("Forked")
        order(server, "k1")
        prepared = made(server, "k1")
        os.kill(first, signal.SIGKILL)
        second = server.await_other(first)
        os.kill(prepared, signal.SIGKILL)
        another = made(server, "k1", other_than=prepared)
        assert server.pid("Forked") == second
        # The one that forked it cannot tell how it ends.
        os.kill(second, signal.SIGTERM)
        server.line("Forked  ", "ended: exit code 0")
        assert parent_of(server.await_other(second)) == another


def test_it_ends_with_the_forkserver_and_the_next_one_makes_it_again(root: Path) -> None:
    with started(root) as server:
        order(server, "k1")
        prepared, forkserver = made(server, "k1"), server.forkserver()
        os.kill(forkserver, signal.SIGKILL)
        ended(prepared)
        another = made(server, "k1", other_than=prepared)
        assert parent_of(another) == server.forkserver() != forkserver
        server.signal(signal.SIGKILL)
        server.process.wait()
        eventually(lambda: server.processes() == (), "a process outlives the server")


def test_other_weights_take_the_place_of_the_old_ones(root: Path) -> None:
    with started(root) as server:
        order(server, "k1")
        old = made(server, "k1")
        order(server, "k2", "changed")
        new = made(server, "k2")
        ended(old)
        eventually(lambda: not server.paths.prepared_socket("k1").exists(), "the old socket is left")
        first = server.pid("Forked")
        os.kill(first, signal.SIGKILL)
        second = server.await_other(first)
        says(server, rf"pid {second} weights \({new}, 'changed'\)", str(WATCHER))
        withdraw(server.paths, "")
        ended(new)
        os.kill(second, signal.SIGKILL)
        assert parent_of(server.await_other(second)) == server.forkserver()
        assert "no fork with loaded weights" not in server.log()


def test_one_with_a_second_thread_is_not_forked(root: Path) -> None:
    with started(root) as server:
        order(server, "k1", "threads")
        says(server, "has loaded weights cannot be forked: 2 threads run in it")
        order(server, "k2")
        prepared = made(server, "k2")
        os.kill(prepared, signal.SIGUSR1)
        eventually(lambda: len(list(Path(f"/proc/{prepared}/task").iterdir())) == 2, "it has one thread")
        first = server.pid("Forked")
        os.kill(first, signal.SIGKILL)
        assert parent_of(server.await_other(first)) == server.forkserver()
        says(server, r"no fork with loaded weights \(.*2 threads run in it\); this process loads them", str(WATCHER))


def test_without_memory_or_weights_there_is_none(root: Path) -> None:
    with started(root) as server:
        order(server, "k1", weight_bytes=2**60)
        says(server, "more of free memory would be needed")
        order(server, "k2", "fails")
        says(server, "ValueError: there are no such weights")
        assert not server.paths.prepared_socket("k1").exists()
        order(server, "k3")
        assert start_time(made(server, "k3")) is not None
