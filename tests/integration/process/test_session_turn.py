"""The model of a server that `benchmarks sessions` measures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from typing import get_args

import pytest

from benchmarks.machine.session_turn import Layout

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("layout", get_args(Layout))
def test_all_of_its_processes_say_how_they_fared(layout: Layout) -> None:
    command = [sys.executable, "-m", "benchmarks.machine.session_turn", layout, "0.5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    said = [json.loads(line) for line in done.stdout.splitlines()]
    cores = len(os.sched_getaffinity(0))
    assert Counter(process["who"] for process in said) == {"host": cores, "engine": cores, "client": 2}
    for process in said:
        if process["who"] == "engine":
            assert process["steps"] > 0
        else:
            assert process["p50"] <= process["p99"] <= process["worst"]
