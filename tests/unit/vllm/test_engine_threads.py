"""The threads of an engine's processes go where the policy has them go, and come back to the cores that they had."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from dynamo_local.core.process.soft_binding import Shares
from dynamo_local.engine.vllm.processes import EngineThreads, SoftBinding, soft_binding
from dynamo_local.tasks import TaskGuard
from state.machine.threads import bind_thread, cores_of, threads_of
from tests.unit.state.builders import ScriptedCores, python

DEADLINE_S = 30.0
CORES = sorted(os.sched_getaffinity(0))
HOME, AWAY = frozenset(CORES[:1]), frozenset(CORES[1:2])

STARVED = (Shares(1.0, 0.95, {}), {CORES[0]: 0.95, CORES[-1]: 0.0})
QUIET = (Shares(100.0, 0.0, {}), {CORES[0]: 0.0, CORES[-1]: 0.0})

THREADS = """
import threading
stop = threading.Event()
def more():
    thread = threading.Thread(target=stop.wait, daemon=True)
    thread.start()
more(), more()
print("ready", flush=True)
input(), more()
print("more", flush=True)
input()
"""

pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="there is nowhere to go on one core")


@dataclass
class Stage:
    """Threads as an engine has them, and a binding that looks."""

    binding: SoftBinding
    watch: ScriptedCores
    threads: EngineThreads
    others: frozenset[int]
    """Threads of processes that other tests have left, such as Python's resource tracker."""
    busy: bool = True

    def cores(self) -> list[frozenset[int]]:
        return [cores_of(thread) for thread in self.threads.ids() if thread not in self.others]

    async def until(self, met: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not met():  # noqa: ASYNC110  # no event tells where threads are
                await asyncio.sleep(0.01)


def make_stage() -> Stage:
    threads, watch = EngineThreads(), ScriptedCores(frozenset(CORES), QUIET)
    threads.forked_here()
    binding = SoftBinding(threads, HOME, watch, lambda: stage.busy)
    stage = Stage(binding, watch, threads, frozenset(threads.ids()))
    return stage


@pytest.fixture
def bound() -> Iterator[None]:
    """Bind this process: what it starts begins on the slot's core."""
    os.sched_setaffinity(0, HOME)
    yield
    os.sched_setaffinity(0, CORES)


async def test_all_threads_leave_and_come_back(bound: None) -> None:
    stage, tasks = make_stage(), TaskGuard()
    with python(THREADS) as engine, stage.binding.starting(tasks):
        stage.watch.says = STARVED
        await stage.until(lambda: stage.cores() == [AWAY] * 3)
        assert engine.stdin is not None
        assert engine.stdout is not None
        print(file=engine.stdin, flush=True)
        assert engine.stdout.readline() == "more\n"
        assert stage.cores() == [AWAY] * 4
        stage.watch.says = QUIET
        await stage.until(lambda: stage.cores() == [HOME] * 4)
    await tasks.close()


async def test_a_thread_that_binds_itself_to_the_slot_meanwhile_is_taken_along(bound: None) -> None:
    stage, tasks = make_stage(), TaskGuard()
    with python(THREADS) as engine, stage.binding.starting(tasks):
        stage.watch.says = STARVED
        await stage.until(lambda: stage.cores() == [AWAY] * 3)
        bind_thread(engine.pid, HOME)
        await stage.until(lambda: stage.cores() == [AWAY] * 3)
    await tasks.close()


async def test_a_thread_that_is_elsewhere_on_purpose_stays_there(bound: None) -> None:
    stage, tasks = make_stage(), TaskGuard()
    with python(THREADS) as engine:
        reader = threads_of(engine.pid)[-1]
        bind_thread(reader, CORES)
        with stage.binding.starting(tasks):
            stage.watch.says = STARVED
            await stage.until(lambda: stage.cores().count(AWAY) == 2)
            assert cores_of(reader) == set(CORES)
            stage.watch.says = QUIET
            await stage.until(lambda: stage.cores().count(HOME) == 2)
            assert cores_of(reader) == set(CORES)
    await tasks.close()


async def test_nobody_looks_while_there_is_nothing_to_do(bound: None) -> None:
    stage, tasks = make_stage(), TaskGuard()
    stage.busy = False
    with stage.binding.starting(tasks):
        await stage.until(lambda: stage.watch.looks >= 2)
    await asyncio.sleep(0.6)
    looks = stage.watch.looks
    await asyncio.sleep(1.0)
    assert stage.watch.looks == looks
    stage.binding.wake()
    await stage.until(lambda: stage.watch.looks > looks)
    await tasks.close()


def test_forks_begin_on_the_cores_of_the_slot_and_this_process_stays_where_it_is() -> None:
    code = f"""
import os
from dynamo_local.engine.vllm.processes import EngineThreads, soft_binding
binding = soft_binding(EngineThreads(), lambda: False, {{"DYN_CPU_CORES": "{CORES[0]}"}})
binding.bind_forks()
if (child := os.fork()) == 0:
    os._exit(os.sched_getaffinity(0) != {{{CORES[0]}}})
_, status = os.waitpid(child, 0)
print("ready" if status == 0 and len(os.sched_getaffinity(0)) == {len(CORES)} else status, flush=True)
input()
"""
    with python(code):
        pass


def test_a_worker_without_cores_of_its_own_is_not_bound() -> None:
    assert soft_binding(EngineThreads(), lambda: False, {}) is None


def test_the_waiting_of_an_engine_adds_up() -> None:
    threads = EngineThreads()
    threads.forked_here()
    assert threads.waited_s() == 0.0
    assert threads.waited_s() <= threads.waited_s()
