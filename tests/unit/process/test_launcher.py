"""What the launcher waits for before it asks for a fork."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SLOW = ("ctypes", "dataclasses", "inspect", "msgspec", "pathlib", "re", "typing")


def test_little_is_imported_before_a_fork_is_asked_for() -> None:
    code = f"import sys, dynamo_local.process.forkserver.launcher; print([n for n in {SLOW!r} if n in sys.modules])"
    # -S: an editable installation may import more.
    command = [sys.executable, "-S", "-c", code]
    found = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
