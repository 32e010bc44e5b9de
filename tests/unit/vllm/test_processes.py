"""Processes that are watched until one of them has ended."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dynamo_local.engine.vllm.engine import VllmEngine
from dynamo_local.engine.vllm.processes import EngineProcesses

DEADLINE_S = 60.0


@pytest.fixture
def sleepers() -> Iterator[list[subprocess.Popen[bytes]]]:
    started = [subprocess.Popen(["sleep", "1000"]) for _ in range(3)]
    yield started
    for one in started:
        one.kill()
        one.wait()


@pytest.mark.parametrize("which", [0, 1, 2])
async def test_the_end_of_any_is_told_once(sleepers: list[subprocess.Popen[bytes]], which: int) -> None:
    told = asyncio.Semaphore(0)
    EngineProcesses([one.pid for one in sleepers], told.release)
    sleepers[which].kill()
    await asyncio.wait_for(told.acquire(), DEADLINE_S)
    for one in sleepers:
        one.kill()
        one.wait()
    await asyncio.sleep(0)
    assert told.locked()


async def test_one_that_has_ended_before_it_could_be_watched_is_told_of(
    sleepers: list[subprocess.Popen[bytes]],
) -> None:
    gone, *_ = sleepers
    gone.kill()
    gone.wait()
    told = asyncio.Event()
    EngineProcesses([one.pid for one in sleepers], told.set)
    await asyncio.wait_for(told.wait(), DEADLINE_S)


async def test_when_it_is_closed_nothing_is_told_and_no_descriptor_is_left(
    sleepers: list[subprocess.Popen[bytes]],
) -> None:
    before = descriptors()
    told = asyncio.Event()
    watched = EngineProcesses([one.pid for one in sleepers], told.set)
    watched.close()
    for one in sleepers:
        one.kill()
        one.wait()
    await asyncio.sleep(0)
    assert not told.is_set()
    assert descriptors() == before


async def test_killed_they_are_gone_and_nothing_is_told_of_it(sleepers: list[subprocess.Popen[bytes]]) -> None:
    told = asyncio.Event()
    watched = EngineProcesses([one.pid for one in sleepers], told.set)
    sleepers[0].send_signal(signal.SIGSTOP)
    sleepers[1].kill()
    sleepers[1].wait()
    await watched.kill(DEADLINE_S)
    assert all(one.poll() is not None for one in sleepers)
    watched.close()
    await asyncio.sleep(0)
    assert not told.is_set()


@dataclass
class Client:
    """Stand in for vLLM's client, which waits for its processes to end. What it does if they do not is not wanted."""

    processes: list[subprocess.Popen[bytes]]

    def shutdown(self, timeout: float) -> None:
        for one in self.processes:
            one.wait(timeout)


async def test_an_engine_whose_processes_hang_is_closed(
    sleepers: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    engine = VllmEngine({}, tmp_path)
    engine._core = Client(sleepers)
    engine._processes = EngineProcesses([one.pid for one in sleepers], lambda: None)
    for one in sleepers:
        one.send_signal(signal.SIGSTOP)
    await engine.close(0.0)
    assert [one.returncode for one in sleepers] == [-signal.SIGKILL] * 3


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())
