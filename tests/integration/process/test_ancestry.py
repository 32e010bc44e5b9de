"""No child survives its parent, seen through pidfds: they become readable when a process ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import pytest

from dynamo_local.process.ancestry import PARENT_PID_ENV

pytestmark = pytest.mark.integration

DEADLINE_S = 60.0
GUARDED = [sys.executable, "-m", "dynamo_local.process.guarded", "--"]

START_GUARDED = """
import os, subprocess, sys
from dynamo_local.process.ancestry import PARENT_PID_ENV
command = [sys.executable, "-m", "dynamo_local.process.guarded", "--", "sh", "-c", "echo $$; exec sleep 1000"]
subprocess.Popen(command, env={**os.environ, PARENT_PID_ENV: str(os.getpid())}, start_new_session=True).wait()
"""

FORK = """
import os, signal, threading
from dynamo_local.process.ancestry import let_forks_lead_sessions, prepare_forks
prepare_forks()

def live(generations):
    if generations and os.fork() == 0:
        live(generations - 1)
    os.write(1, f"{{os.getpid()}}\\n".encode())  # in one piece, as others write too
    signal.pause()

{start}
"""
FORK_FROM_MAIN = FORK.format(start="live(2)")
FORK_WITH_A_SESSION = FORK.format(start="let_forks_lead_sessions(); live(2)")
FORK_FROM_THREAD = FORK.format(start="threading.Thread(target=live, args=(1,)).start(); signal.pause()")
"""The thread stays, as an engine's does."""

ORPHANED_BEFORE = """
import os, signal
from dynamo_local.process import ancestry
reading, writing = os.pipe()
if os.fork() == 0:
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        os.read(reading, 1)  # until the parent is gone
        ancestry.die_with_parent({parent})
        signal.pause()
    os._exit(0)
os.wait()
os.write(writing, b"x")
signal.pause()
"""

SIGNALLED_CHILD = """
import asyncio, os, signal
from dynamo_local.process.ancestry import prepare_forks
{prepare}

async def main():
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    # The wake-up, if there is one, is in the loop's socket before the child ends: one turn handles it.
    for _ in range(3):
        await asyncio.sleep(0)
    print(status, told.is_set(), flush=True)

asyncio.run(main())
"""


@contextmanager
def running(script: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process; what it and its children print comes out of its stdout."""
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait(DEADLINE_S)
        assert process.stdout is not None
        process.stdout.close()


def told_pids(process: subprocess.Popen[str], count: int) -> list[int]:
    assert process.stdout is not None
    return [int(process.stdout.readline()) for _ in range(count)]


@contextmanager
def watching(pids: Sequence[int]) -> Iterator[list[int]]:
    """Handles of processes that still live; those left at the end are killed."""
    handles = [os.pidfd_open(pid) for pid in pids]
    try:
        yield handles
    finally:
        for handle in handles:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            os.close(handle)


def ends(handle: int) -> bool:
    """Whether the process ends within the deadline."""
    readable, _, _ = select.select([handle], [], [], DEADLINE_S)
    return bool(readable)


@pytest.mark.parametrize(
    ("script", "children"),
    [
        pytest.param(START_GUARDED, 1, id="a guarded foreign program"),
        pytest.param(FORK_FROM_MAIN, 3, id="forked children and theirs"),
        pytest.param(FORK_FROM_THREAD, 2, id="forked by a thread"),
        pytest.param(FORK_WITH_A_SESSION, 3, id="in a session of their own"),
    ],
)
def test_when_the_parent_is_killed_its_children_die(script: str, children: int) -> None:
    with running(script) as parent:
        pids = [pid for pid in told_pids(parent, children) if pid != parent.pid]
        assert pids
        with watching(pids) as handles:
            assert select.select(handles, [], [], 0)[0] == []
            parent.kill()
            assert all(ends(handle) for handle in handles)


def test_a_forked_child_leads_a_session_and_its_own_stay_in_it() -> None:
    with running(FORK_WITH_A_SESSION) as parent:
        pids = [pid for pid in told_pids(parent, 3) if pid != parent.pid]
        with watching(pids):
            (session,) = {os.getsid(pid) for pid in pids}
            assert session in pids
            assert os.getsid(parent.pid) == os.getsid(0)


@pytest.mark.parametrize("parent", ["os.getppid() + 1", "1 if os.getppid() != 1 else 2"])
def test_a_child_whose_parent_died_before_it_asked_ends_itself(parent: str) -> None:
    with running(ORPHANED_BEFORE.format(parent=parent)) as process, watching(told_pids(process, 1)) as (handle,):
        assert ends(handle)


@pytest.mark.parametrize(("prepare", "parent_is_told"), [("prepare_forks()", False), ("", True)])
def test_a_childs_signal_is_not_taken_for_its_parents(prepare: str, parent_is_told: bool) -> None:
    """The second case shows the fault that the preparation mends."""
    with running(SIGNALLED_CHILD.format(prepare=prepare)) as process:
        assert process.stdout is not None
        assert process.stdout.readline().split() == ["7", str(parent_is_told)]


def guarded(*command: str, parent: int | None = None) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, PARENT_PID_ENV: str(os.getpid() if parent is None else parent)}
    return subprocess.run(
        [*GUARDED, *command], env=environ, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )


def test_a_guarded_program_is_run_as_it_is() -> None:
    done = guarded("sh", "-c", 'echo "$@"; exit 3', "sh", "--flag", "a b")
    assert (done.returncode, done.stdout, done.stderr) == (3, "--flag a b\n", "")


def test_a_guarded_program_does_not_learn_of_the_guard() -> None:
    """Otherwise its children would take the wrong process for their parent."""
    assert PARENT_PID_ENV not in guarded("env").stdout


def test_a_guarded_program_is_not_started_for_a_parent_that_is_gone() -> None:
    done = guarded("echo", "started", parent=os.getpid() + 1)
    assert (done.returncode, done.stdout) == (1, "")


@pytest.mark.parametrize("command", ["/nowhere/program", "/etc", "/etc/hostname"])
def test_a_program_that_cannot_be_run_is_told_in_one_line(command: str) -> None:
    done = guarded(command)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: cannot run {command}: ")
    assert done.stderr.count("\n") == 1


def test_without_a_command_the_usage_is_shown() -> None:
    done = subprocess.run(GUARDED[:-1], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("usage:")
