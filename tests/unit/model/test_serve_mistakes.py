"""Mistakes with models at `dynamo serve`: what is typed, what is said, the exit code; nothing is started."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("huggingface_hub", reason="the hub's library is not installed")

from tests.unit.model.hub.imitated_hub import REPO, imitated_hub
from tests.unit.model.model_folders import model_files

MISTAKES: list[tuple[tuple[str, ...], str, int]] = [
    (("--model", "/no/such/folder"), r"^error: there is no folder /no/such/folder; check the path", 2),
    (("--model", "org/other"), r"^error: there is no model org/other on 127\.0\.0\.1:\d+; check the spelling", 2),
    (("--model", REPO), r"^error: org/name is gated, and you have no access yet; accept its terms at http://", 2),
]


@pytest.mark.parametrize(("arguments", "said", "exit_code"), MISTAKES, ids=[" ".join(row[0]) for row in MISTAKES])
def test_a_model_that_cannot_be_had(tmp_path: Path, arguments: tuple[str, ...], said: str, exit_code: int) -> None:
    state = tmp_path / "state"
    with imitated_hub(model_files()) as hub:
        hub.gated = True
        environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "hf"),
            "DYN_LOCAL_STATE_DIR": str(state),
            "DYN_CPU_SLOTS": "1",
        }
        command = [sys.executable, "-c", "from dynamo_local.cli.main import main; main()", "serve", "--port", "0"]
        graph = ["examples.llm.graphs.agg:Frontend", "-f", "examples/llm/configs/agg.yaml", "--namespace", "mistaken"]
        ended = subprocess.run(
            [*command, *graph, *arguments], env=environ, capture_output=True, text=True, timeout=120, check=False
        )
    assert ended.returncode == exit_code
    assert re.search(said, ended.stderr)
    assert ended.stderr.count("\n") == 1
    assert not state.exists()
