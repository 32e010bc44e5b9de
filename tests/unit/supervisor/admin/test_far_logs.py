"""Logs of nodes that do not always answer."""

from __future__ import annotations

from pathlib import Path

from dynamo_local.core.errors import SilentNodeError
from dynamo_local.supervisor.admin.far_logs import FarLogs
from state.paths import StatePaths


class Silent(FarLogs):
    """The log of a node that answers or not."""

    def __init__(self, root: Path) -> None:
        super().__init__(StatePaths(root, "far"))
        self.lines = [f"line {number}" for number in range(9)]
        self.answers = True

    async def _read(self, watcher: str, lines: int, after: int | None) -> tuple[tuple[str, ...], int]:
        if not self.answers:
            raise SilentNodeError("node a does not answer")
        return tuple(self.lines[after or 0 :][-lines:]), len(self.lines)


def test_a_log_whose_node_did_not_answer_is_not_shown_from_its_beginning(tmp_path: Path) -> None:
    with Silent(tmp_path) as logs:
        follower = logs.follower("far_VllmWorker")
        logs.answers = False
        assert follower.last_lines(2) == []
        assert follower.new_lines() == []
        logs.answers = True
        assert follower.new_lines() == ["line 7", "line 8"]
        logs.answers = False
        assert follower.new_lines() == []
        logs.lines.append("line 9")
        logs.answers = True
        assert follower.new_lines() == ["line 9"]


def test_a_log_that_begins_meanwhile_is_shown_from_its_beginning(tmp_path: Path) -> None:
    with Silent(tmp_path) as logs:
        assert logs.follower("far_VllmWorker").new_lines() == logs.lines
