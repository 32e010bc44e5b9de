from __future__ import annotations

import os
import subprocess

import pytest

from state.machine.processes import Process, ProcFs, alive, start_time, this_process
from tests.unit.state.builders import python

READY = "print('ready', flush=True); input()"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {READY}"


def find(pid: int) -> Process:
    return next(process for process in ProcFs().snapshot() if process.pid == pid)


def test_this_process_is_alive_and_an_earlier_one_of_its_pid_is_not() -> None:
    me = this_process()
    assert me.pid == os.getpid()
    assert alive(me.pid, me.start_time)
    assert not alive(me.pid, me.start_time - 1)


def test_a_zombie_is_dead() -> None:
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert start_time(process.pid) is None
    process.wait()
    assert start_time(process.pid) is None


def test_a_name_with_parentheses_does_not_confuse() -> None:
    code = "import ctypes; ctypes.CDLL(None).prctl(15, b') S 1 (', 0, 0, 0); " + READY
    with python(code) as process:
        assert start_time(process.pid) == find(process.pid).start_time
        assert start_time(process.pid) not in (None, 0)


def test_a_snapshot_shows_environments_but_not_us_and_our_ancestors() -> None:
    with python(READY, {"DYN_WATCHER": "dynamo_A"}) as process:
        snapshot = {found.pid: found for found in ProcFs().snapshot()}
    assert snapshot[process.pid].environ["DYN_WATCHER"] == "dynamo_A"
    assert not {os.getpid(), os.getppid()} & set(snapshot)


def test_a_willing_process_ends_on_sigterm() -> None:
    with python(READY) as process:
        assert ProcFs().end([find(process.pid)], term_s=30, kill_s=0) == ()
        assert process.wait() == -15


def test_a_stubborn_process_is_killed() -> None:
    with python(STUBBORN) as process:
        assert ProcFs().end([find(process.pid)], term_s=0.05, kill_s=30) == ()
        assert process.wait() == -9


def test_who_does_not_end_in_time_is_reported() -> None:
    signals: list[int] = []
    with python(READY) as process:
        found = find(process.pid)
        # Signals that do not arrive: as if it hung in a driver.
        deaf = ProcFs(send=lambda _, number: signals.append(number))
        assert deaf.end([found], term_s=0, kill_s=0) == (found,)
    assert signals == [15, 9]


@pytest.mark.parametrize("later", [1, -1])
def test_another_process_of_the_same_pid_is_left_alone(later: int) -> None:
    with python(READY) as process:
        found = find(process.pid)
        other = Process(found.pid, found.start_time + later, found.environ)
        assert ProcFs().end([other], term_s=0, kill_s=0) == ()
        assert process.poll() is None


def test_a_process_that_is_gone_is_no_trouble() -> None:
    with python(READY) as process:
        found = find(process.pid)
    assert ProcFs().end([found], term_s=0, kill_s=0) == ()
