"""Damage to a running server's files, and its repair, on real circus and NATS with mockers."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dynamo_local.core.errors import NotRunningError, StateError
from state.files import sockets_of
from state.locks import ServerLock
from state.statefile.store import StateStore
from tests.integration.server_process import eventually
from tests.integration.supervisor.scaled_server import NAMESPACE, ScaledServer

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScaledServer]:
    """A server with one decode and one prefill worker, and two free slots. Each test restores that; in the end the
    server must end in order."""
    with ScaledServer(tmp_path_factory.mktemp("state") / "state") as server:
        yield server
        server.ends_well()


@pytest.fixture
def doomed() -> Iterator[ScaledServer]:
    """A server that may break. Its path is short, so that its sockets are in its run directory."""
    with tempfile.TemporaryDirectory(prefix="dyn") as root, ScaledServer(Path(root) / "s") as server:
        yield server


def files(server: ScaledServer) -> list[str]:
    """Names of files in the run directory and in the directory of the sockets; "PID" for the folder of a process."""
    directories = {server.paths.run_dir, sockets_of(server.paths).directory}
    return sorted("PID" if path.name.isdigit() else path.name for each in directories for path in each.iterdir())


def remove(directory: Path) -> None:
    """Remove it at once: file by file, the server would write some of them anew meanwhile."""
    removed = directory.with_name("removed")
    directory.rename(removed)
    shutil.rmtree(removed)


def healed(server: ScaledServer) -> bool:
    try:
        StateStore(server.paths).read_file()
    except (StateError, NotRunningError):
        return False
    return True


def lease_of(server: ScaledServer, name: str) -> str | None:
    entry = server.entry(name)
    return entry.lease if entry is not None else None


def kill_worker(server: ScaledServer, name: str = "VllmWorker") -> None:
    """SIGKILL it, and wait until the next one has registered."""
    before = lease_of(server, name)
    os.kill(server.pid(name), signal.SIGKILL)
    eventually(lambda: lease_of(server, name) not in (None, before), f"{name} was not started again")


def brace(path: Path) -> None:
    path.write_text("{\n")


@pytest.mark.parametrize("harm", [brace, Path.unlink])
def test_a_damaged_statefile_is_written_anew_and_commands_go_on(
    server: ScaledServer, harm: Callable[[Path], None]
) -> None:
    before = server.state()
    harm(server.paths.statefile)
    code, _, err = server.command("scale", "VllmWorker=2")
    assert code == 0, err
    server.line("the statefile was damaged, and is written anew")
    assert set(server.workers()) == {"VllmWorker", "VllmWorker_1", "PrefillWorker"}
    harm(server.paths.statefile)
    assert server.command("scale", "VllmWorker=1")[0] == 0
    eventually(lambda: healed(server), "the statefile was not written anew")
    assert server.state() == before
    # The second time is told as well: each is another damage.
    server.line("the statefile was damaged, and is written anew")


def test_without_any_copy_the_server_remembers_and_workers_that_die_meanwhile_come_back(server: ScaledServer) -> None:
    before = server.workers()
    assert before == {"VllmWorker": (0,), "PrefillWorker": (1,)}
    pid = server.pid("VllmWorker")
    lease = lease_of(server, "VllmWorker")
    brace(server.paths.statefile)
    brace(server.paths.state_copy)
    os.kill(pid, signal.SIGKILL)
    server.line("the statefile was damaged, and is written anew")
    eventually(lambda: lease_of(server, "VllmWorker") not in (None, lease), "the worker was not started again")
    # What the server remembers may be a second old.
    eventually(lambda: server.workers() == before, f"{server.workers()}")
    assert server.command("ps")[0] == 0


def test_workers_that_come_and_go_and_are_killed_leave_no_file(server: ScaledServer) -> None:
    kill_worker(server)
    eventually(lambda: files(server).count("PID") == 3, f"{files(server)}")
    before = files(server)
    assert server.command("scale", "VllmWorker=3")[0] == 0
    for name in ("VllmWorker_1", "VllmWorker_2", "PrefillWorker"):
        kill_worker(server, name)
    assert server.command("scale", "VllmWorker=1")[0] == 0
    eventually(lambda: files(server) == before, f"{files(server)} is not {before}")


def test_a_server_whose_state_directory_is_removed_makes_it_again_and_can_be_stopped(doomed: ScaledServer) -> None:
    components = doomed.state().components
    remove(doomed.paths.root)
    doomed.line(f"{doomed.paths.run_dir} was removed: its files are written anew")
    assert doomed.state().components == components
    code, _, err = doomed.command("ps")
    assert code == 0 or f"{NAMESPACE}.run was removed: the server goes on, and makes it again" in err, err
    doomed.line("another circusd runs and has the 4 processes that run")
    code, _, err = doomed.command("scale", "VllmWorker=2")
    assert code == 0, err
    kill_worker(doomed)
    remove(doomed.paths.root)
    # At once: its lock is not there.
    code, _, err = doomed.command("stop")
    assert code == 0, err
    assert doomed.end() == 0
    doomed.assert_nothing_left()
    assert "unfinished" not in doomed.output


def test_a_server_that_another_one_has_replaced_ends_and_leaves_that_ones_files_alone(doomed: ScaledServer) -> None:
    state = doomed.paths.statefile.read_bytes()
    remove(doomed.paths.root)
    with ServerLock(doomed.paths):
        doomed.paths.run_dir.mkdir(exist_ok=True)
        doomed.paths.statefile.write_bytes(state)
        doomed.paths.blueprint_file.write_text("another server's")
        assert doomed.end() != 0
        assert f"a server already runs in namespace {NAMESPACE}" in doomed.output
        assert doomed.paths.statefile.exists()
        assert doomed.paths.blueprint_file.read_text() == "another server's"
