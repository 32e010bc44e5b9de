"""Frontends are killed while they answer, and the one who folds goes on: what clients were told is counted, once."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dynamo_local.core.usage.totals import report
from state.paths import StatePaths
from state.usage.totals import UsageStore, read_usage

pytestmark = pytest.mark.integration

FRONTENDS = 2
ANSWERS = 300
"""That each frontend gives before it is killed."""
CLIENTS = 8
LARGEST = 14
"""Most tokens of an answer of metered_frontend.py, prompt and output together."""


def test_what_clients_were_told_is_counted_once_under_kills(tmp_path: Path) -> None:
    paths = StatePaths(tmp_path, "metered")
    store = UsageStore(paths)
    told = answers = 0
    for number in range(FRONTENDS):
        command = [sys.executable, "-m", "tests.integration.frontend.metered_frontend", f"lease{number}"]
        environ = {**os.environ, "DYN_LOCAL_STATE_DIR": str(tmp_path)}
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environ) as frontend:
            assert frontend.stdout is not None
            lines = [frontend.stdout.readline() for _ in range(ANSWERS)]
            # Folded while it writes, and cut off in whatever it does.
            store.fold(time.time())
            lines += [frontend.stdout.readline() for _ in range(ANSWERS)]
            frontend.kill()
            lines += frontend.stdout.readlines()
        whole = [int(line) for line in lines if line.endswith(b"\n")]
        told, answers = told + sum(whole), answers + len(whole)
        found = report(read_usage(paths)).total
        # More by what was in flight at a kill: written, and not told any more.
        most = (number + 1) * CLIENTS
        assert told <= found.prompt + found.output <= told + most * LARGEST
        assert answers <= found.requests <= answers + most

    before = report(read_usage(paths)).total
    for _ in range(2):
        assert store.fold(time.time()).damaged == 0
    assert report(read_usage(paths)).total == before
    assert [path.name for path in paths.usage_dir.iterdir()] == ["totals.json"]
