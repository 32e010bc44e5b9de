"""Processes that are silent because they wait for a core are told from others that are silent."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from msgspec.structs import replace

from dynamo_local.bus.presence import Starvation
from dynamo_local.core.messages.presence import Presence
from tests.unit.state.builders import python, spinning

DEADLINE_S = 30.0
LOOK_S = 0.1
READY = "print('ready', flush=True); input()"
CORE = min(os.sched_getaffinity(0))


def presence(pid: int) -> Presence:
    return Presence(f"ns_Worker_{pid}", "Worker", "aggregated", str(pid), pid, "ready")


def verdicts(pid: int, looks: int = 5) -> list[bool]:
    starvation = Starvation()
    starvation.look([presence(pid)])
    found = []
    for _ in range(looks):
        time.sleep(LOOK_S)
        found.append(bool(starvation.look([presence(pid)])))
    return found


def until(met: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not met():
        assert time.monotonic() < deadline


def test_a_process_that_waits_for_a_core_is_starved() -> None:
    with spinning(CORE), spinning(CORE, nice=19) as starved:
        until(lambda: all(verdicts(starved.pid)))


def test_one_that_is_stopped_is_not_though_others_compute_on_its_core() -> None:
    with spinning(CORE), spinning(CORE, nice=19) as stopped:
        stopped.send_signal(signal.SIGSTOP)
        until(lambda: not any(verdicts(stopped.pid)))


def test_one_that_sleeps_is_not() -> None:
    with python(READY) as asleep:
        until(lambda: not any(verdicts(asleep.pid)))


def test_one_that_is_gone_or_a_zombie_is_not() -> None:
    with spinning(CORE) as process:
        starvation = Starvation()
        starvation.look([presence(process.pid)])
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert starvation.look([presence(process.pid)]) == frozenset()
        process.wait()
        assert starvation.look([presence(process.pid)]) == frozenset()


def test_a_first_look_tells_nothing_nor_does_one_after_it_was_heard() -> None:
    with spinning(CORE), spinning(CORE, nice=19) as starved:
        starvation = Starvation()
        for _ in range(5):
            assert starvation.look([presence(starved.pid)]) == frozenset()
            starvation.look([])


def test_the_pid_of_a_process_on_another_machine_says_nothing_here() -> None:
    """The process of that pid on this machine would be taken for it."""
    with spinning(CORE), spinning(CORE, nice=19) as stranger:
        until(lambda: all(verdicts(stranger.pid)))
        elsewhere, starvation = replace(presence(stranger.pid), machine="another"), Starvation()
        for _ in range(3):
            assert starvation.look([elsewhere]) == frozenset()
            time.sleep(LOOK_S)
