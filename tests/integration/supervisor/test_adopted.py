"""Processes that stand for others, orphans and those who bury them, and death pipes. With real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dynamo_local.process.ancestry import DEATH_PIPE_ENV, PARENT_PID_ENV, DeathPipe
from dynamo_local.supervisor.circus.adopted import adoption, command_line, living_process, stands_in
from state.machine.processes import alive, start_time
from tests.integration.server_process import PATIENCE_S, eventually

pytestmark = pytest.mark.integration

TOLD = "trap 'echo told; exit 7' TERM; echo up; while :; do sleep 0.02; done"
GUARDED = (sys.executable, "-m", "dynamo_local.process.guarded", "--")


@contextmanager
def running(*command: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    environ = {**os.environ, **environment}
    process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE_S)


@contextmanager
def adopting(process: subprocess.Popen[str], parent: int | None = None) -> Iterator[subprocess.Popen[str]]:
    started = start_time(process.pid)
    assert started is not None
    command = adoption(process.pid, started, ("sh", "-c", "echo started again $DYN_PARENT_PID"))
    with running(*command, **{PARENT_PID_ENV: str(parent or os.getpid())}) as stand_in:
        yield stand_in


@contextmanager
def adopted() -> Iterator[tuple[subprocess.Popen[str], subprocess.Popen[str]]]:
    """A process, and the one that stands for it."""
    with running("sh", "-c", TOLD) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        with adopting(process) as stand_in:
            eventually(lambda: stands_in(stand_in.pid), "it does not stand for the other one")
            yield process, stand_in


def test_signals_are_passed_on_and_it_ends_as_the_other_one_does() -> None:
    with adopted() as (process, stand_in):
        assert living_process(stand_in.pid) == process.pid
        stand_in.send_signal(signal.SIGTERM)
        assert stand_in.wait(PATIENCE_S) == 7
        assert process.communicate(timeout=PATIENCE_S)[0] == "told\n"


def test_a_killed_process_is_told_of_as_such() -> None:
    with adopted() as (process, stand_in):
        os.kill(process.pid, signal.SIGKILL)
        assert stand_in.wait(PATIENCE_S) == -signal.SIGKILL


def test_what_is_dead_is_started_again() -> None:
    with running("sleep", "600") as process:
        started = start_time(process.pid)
        assert started is not None
        process.kill()
        process.wait(PATIENCE_S)
        command = adoption(process.pid, started, ("sh", "-c", "echo started again $DYN_PARENT_PID"))
        with running(*command, **{PARENT_PID_ENV: "1"}) as again:
            assert again.communicate(timeout=PATIENCE_S)[0] == "started again\n"


def test_one_whose_circusd_is_gone_ends_and_leaves_the_other_one_alone() -> None:
    with running("sh", "-c", TOLD) as process, adopting(process, parent=os.getpid() + 1) as stand_in:
        assert stand_in.wait(PATIENCE_S) == 1
        assert process.poll() is None


def test_any_other_process_stands_for_itself() -> None:
    assert living_process(os.getpid()) == os.getpid()
    with running("sleep", "600") as process:
        process.kill()
        process.wait(PATIENCE_S)
        assert living_process(process.pid) == process.pid


# Death pipes


def test_a_foreign_program_dies_with_the_holder_and_not_with_its_parent() -> None:
    pipe = DeathPipe()
    script = f"{' '.join(GUARDED)} sh -c 'echo $$ $DYN_DEATH_PIPE; exec sleep 600' &"
    with running("sh", "-c", script, **{DEATH_PIPE_ENV: pipe.address}) as parent:
        assert parent.wait(PATIENCE_S) == 0
        assert parent.stdout is not None
        # It does not learn of the pipe.
        (orphan,) = map(int, parent.stdout.readline().split())
        started = start_time(orphan)
        assert started is not None
        eventually(lambda: command_line(orphan)[0] == "sleep", "it is still a shell")
        pipe.close()
        eventually(lambda: not alive(orphan, started), "it outlives the holder")


@pytest.mark.parametrize("address", ["{pid}:{fd}:{wrong}", "{pid}:999:{inode}", "4194305:{fd}:{inode}"])
def test_a_program_is_not_started_for_a_holder_that_is_gone(address: str) -> None:
    pipe = DeathPipe()
    pid, descriptor, inode = pipe.address.split(":")
    wrong = address.format(pid=pid, fd=descriptor, inode=inode, wrong=int(inode) + 1)
    with running(*GUARDED, "echo", "started", **{DEATH_PIPE_ENV: wrong}) as process:
        assert process.communicate(timeout=PATIENCE_S)[0] == ""
        assert process.returncode == 1
    pipe.close()


# Orphans


def test_children_that_died_are_reaped_after_a_while() -> None:
    """Runs in a process of its own, as a reaper in the test run would reap the children of other tests."""
    script = """
import asyncio, os, signal, subprocess, sys
from pathlib import Path
from dynamo_local.process.ancestry import adopt_orphans
from dynamo_local.supervisor.upkeep.orphans import Reaper
from state.machine.processes import exit_code

async def main():
    adopt_orphans()
    asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, Reaper(lambda: shell.pid, keep_s=0.2).look)
    shell = await asyncio.create_subprocess_exec("sh", "-c", "sleep 0.2 & exit 5")
    assert await shell.wait() == 5
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    while children.read_text().split():
        await asyncio.sleep(0.02)

asyncio.run(asyncio.wait_for(main(), 60))
"""
    repository = str(Path(__file__).parents[3])
    done = subprocess.run([sys.executable, "-c", script], cwd=repository, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0
