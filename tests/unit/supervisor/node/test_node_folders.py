"""What node servers of former nodes have left."""

from __future__ import annotations

import os
from pathlib import Path

from dynamo_local.supervisor.node.server import remove_left
from state.locks import ServerLock
from state.paths import StatePaths


def test_folders_in_which_nobody_runs_are_removed_after_a_while(tmp_path: Path) -> None:
    for name in ("ended", "running", "recent", "elsewhere"):
        remove_left(tmp_path / name)
    (tmp_path / "elsewhere" / "host").write_text("another machine")
    (tmp_path / "strange").mkdir()
    with ServerLock(StatePaths(tmp_path / "running", "far")):
        for name in ("ended", "running", "elsewhere", "strange"):
            os.utime(tmp_path / name, (0, 0))
        remove_left(tmp_path / "mine")
        assert {path.name for path in tmp_path.iterdir()} == {"running", "recent", "elsewhere", "strange", "mine"}
