from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dynamo_local.cli.working_folder import leave_unusable_folder

SHOW = (
    "from pathlib import Path; from dynamo_local.cli.working_folder import leave_unusable_folder\n"
    "print(leave_unusable_folder(), Path.cwd())"
)


def test_a_usable_folder_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert leave_unusable_folder() is None
    assert Path.cwd() == tmp_path


def from_removed_folder(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments in a folder that is gone."""
    gone = tmp_path / "gone"
    gone.mkdir()
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "DYN_LOCAL_STATE_DIR": str(tmp_path)}
    # The shell removes the folder in which it is.
    command = ["/bin/sh", "-c", 'rmdir "$0" && exec "$@"', str(gone), sys.executable, *arguments]
    return subprocess.run(command, cwd=gone, env=environ, capture_output=True, text=True, check=False)


def test_a_removed_folder_is_left(tmp_path: Path) -> None:
    found = from_removed_folder(tmp_path, "-c", SHOW)
    assert found.stdout == "the working folder was removed: processes run in / /\n", found.stderr


def test_a_graph_is_served_from_a_removed_folder(tmp_path: Path) -> None:
    serve = ("-m", "dynamo_local.cli.main", "serve", "examples.llm.graphs.agg:Frontend", "--dry-run")
    found = from_removed_folder(tmp_path, *serve)
    assert (found.returncode, found.stderr) == (0, "the working folder was removed: processes run in /\n")
    assert "VllmWorker" in found.stdout
