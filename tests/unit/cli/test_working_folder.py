from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dynamo_local.cli.serve import leave_unusable_folder

SHOW = (
    "from pathlib import Path; from dynamo_local.cli.serve import leave_unusable_folder\n"
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


def test_folders_are_named_in_utf_8_whatever_the_locale_knows(tmp_path: Path) -> None:
    folder, settings = tmp_path / "mod\u00e8le", tmp_path / "models.yaml"
    folder.mkdir()
    settings.write_text(f"endpoints:\n  - name: chat\n    model: {folder}\n", "utf-8")
    environ = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "DYN_LOCAL_STATE_DIR": str(tmp_path)}
    serve = (sys.executable, "-m", "dynamo_local.cli.main", "serve")
    for arguments, code, told in (
        (("-f", str(settings), "--dry-run"), 0, "Frontend"),
        ((str(tmp_path / "\u00e9t\u00e9"), "--explain"), 2, "there is no folder"),
        ((str(folder), "--explain"), 2, f"{folder}"),
    ):
        found = subprocess.run(
            (*serve, *arguments), env=environ, capture_output=True, encoding="utf-8", check=False, timeout=120
        )
        assert (found.returncode, told in found.stdout + found.stderr) == (code, True), found.stderr
        assert "Traceback" not in found.stderr
