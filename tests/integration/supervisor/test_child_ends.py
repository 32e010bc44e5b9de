"""circusd sees its processes end at once, and not when it is time to look."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from dynamo_local.supervisor.circus.client import ProcessEnded
from dynamo_local.supervisor.circus.daemon import CHECK_DELAY_S
from tests.integration.supervisor.test_supervisor import SLEEP, Box, box, process_ended

__all__ = ["box"]
pytestmark = pytest.mark.integration

PROCESSES = 5


async def test_processes_that_are_killed_are_told_of_long_before_circusd_looks_by_itself(box: Box) -> None:
    pids = {}
    for number in range(PROCESSES):
        name = f"ns_W{number}"
        await box.circus.add(box.spec(name, *SLEEP))
        (pids[name.lower()],) = await box.circus.pids(name)
    took_s = []
    for name, pid in pids.items():
        killed_at = asyncio.get_running_loop().time()
        os.kill(pid, signal.SIGKILL)
        assert await process_ended(box) == ProcessEnded(name, pid, -signal.SIGKILL)
        took_s.append(asyncio.get_running_loop().time() - killed_at)
    # One of them may coincide with circusd's own look, not all.
    assert sorted(took_s)[PROCESSES // 2] < CHECK_DELAY_S / 5, took_s


async def test_several_that_end_together_are_all_seen(box: Box) -> None:
    pids = {}
    for number in range(PROCESSES):
        await box.circus.add(box.spec(f"ns_W{number}", *SLEEP))
        (pids[f"ns_w{number}"],) = await box.circus.pids(f"ns_W{number}")
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
    ends = [await process_ended(box) for _ in pids]
    assert {end.watcher: end.pid for end in ends} == pids
