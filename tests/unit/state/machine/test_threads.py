"""Threads and cores of this machine, read while processes compute, wait, sleep and are stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable

from dynamo_local.core.process.soft_binding import shares_between
from state.machine.threads import (
    CoreWatch,
    bind_thread,
    busy_seconds,
    cores_of,
    family_of,
    forked_by,
    threads_of,
    times_of,
    times_of_all,
)
from tests.unit.state.builders import python, spinning

DEADLINE_S = 120.0
LOOK_S = 0.1
READY = "print('ready', flush=True); input()"
CORE = min(os.sched_getaffinity(0))


def until(met: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not met():
        assert time.monotonic() < deadline
        time.sleep(LOOK_S / 10)


def shares(pid: int) -> tuple[float, float]:
    """The shares of the next moment in which the process ran, and waited for a core."""
    before, began = times_of_all([pid]), time.monotonic()
    time.sleep(LOOK_S)
    found = shares_between(before, times_of_all([pid]), seconds := time.monotonic() - began)
    return sum(found.ran_s.values()) / seconds, found.waited_s / seconds


def test_who_computes_beside_others_that_go_first_waits() -> None:
    with spinning(CORE), spinning(CORE, nice=19) as starved:
        until(lambda: shares(starved.pid)[1] > 0.8)
        times = times_of(starved.pid, starved.pid)
        assert times is not None
        assert times.core == CORE


def test_who_is_stopped_or_asleep_does_not_wait() -> None:
    with spinning(CORE), spinning(CORE) as stopped, python(READY) as asleep:
        stopped.send_signal(signal.SIGSTOP)
        # A thread that waits for the core when the signal comes is stopped once it has it.
        until(lambda: shares(stopped.pid) == (0.0, 0.0))
        until(lambda: shares(asleep.pid) == (0.0, 0.0))


def test_what_others_have_of_a_core_is_told_from_what_is_ours() -> None:
    """Two processes share a core, and each gets about half of it."""
    with spinning(CORE), spinning(CORE) as ours:
        watch = CoreWatch(frozenset({CORE}))
        assert watch.look(times_of_all([ours.pid])) is None
        others: list[float] = []

        def look() -> bool:
            time.sleep(0.5)
            seen = watch.look(times_of_all([ours.pid]))
            assert seen is not None
            others.append(seen[1][CORE])
            # Of a core that is busy all the time, the others have what we have not.
            return abs(others[-1] + seen[0].ran_s.get(CORE, 0.0) / seen[0].seconds - 1.0) < 0.15

        until(look)
        assert others[-1] > 0.1


def test_the_threads_of_ours_that_are_beside_are_no_others() -> None:
    """Threads given as `beside` do not count as others, whatever else computes on the core."""
    with spinning(CORE) as ours:
        watch = CoreWatch(frozenset({CORE}))
        before = times_of_all([ours.pid])
        watch.look({}, before)

        def look() -> bool:
            nonlocal before
            time.sleep(0.5)
            now = times_of_all([ours.pid])
            beside = watch.look({}, now)
            assert beside is not None
            assert beside[0].waited_s == 0.0
            ran = shares_between(before, now, beside[0].seconds).ran_s.get(CORE, 0.0) / beside[0].seconds
            before = now
            assert beside[1][CORE] < 1.15 - ran
            # Enough to be told from nothing; on a busy machine it may take long until it gets that much.
            return ran > 0.2

        until(look)


def test_busy_seconds_are_told_of_every_core_that_we_may_use() -> None:
    assert os.sched_getaffinity(0) <= busy_seconds().keys()


def test_families_are_found_by_the_thread_that_forked() -> None:
    children = "import subprocess; subprocess.Popen(['sleep', '60']); " + READY
    with python(children) as parent:
        me = threading.get_native_id()
        assert parent.pid in forked_by(os.getpid(), me)
        (grandchild,) = forked_by(parent.pid, parent.pid)
        try:
            assert family_of(parent.pid) == (parent.pid, grandchild)
        finally:
            os.kill(grandchild, signal.SIGKILL)


def test_of_a_process_that_is_gone_nothing_is_told() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    assert times_of(process.pid, process.pid) is None
    assert threads_of(process.pid) == ()
    assert forked_by(process.pid, process.pid) == ()
    assert cores_of(process.pid) == frozenset()
    bind_thread(process.pid, {CORE})


def test_a_thread_is_bound() -> None:
    with python(READY) as process:
        bind_thread(process.pid, {CORE})
        assert cores_of(process.pid) == {CORE}
