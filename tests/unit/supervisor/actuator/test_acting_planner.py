"""Which planner acts, by the processes that ask."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from dynamo_local.core.errors import UsageError
from dynamo_local.supervisor.actuator.commands import ActingPlanner


@pytest.fixture
def another() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def test_one_planner_acts_until_its_process_ends(another: subprocess.Popen[bytes]) -> None:
    planner, mine = ActingPlanner("dynamo"), os.getpid()
    planner.begin(another.pid)
    planner.begin(another.pid)
    planner.check(another.pid)
    with pytest.raises(UsageError, match=f"process {another.pid} is the planner of namespace dynamo already; end it"):
        planner.begin(mine)
    with pytest.raises(UsageError, match=f"process {mine} is not the planner that acts"):
        planner.check(mine)
    another.kill()
    another.wait()
    with pytest.raises(UsageError, match="is not the planner that acts"):
        planner.check(another.pid)
    planner.begin(mine)
    planner.check(mine)


def test_a_process_that_is_not_there_does_not_act() -> None:
    with pytest.raises(UsageError, match="there is no process 0"):
        ActingPlanner("dynamo").begin(0)
