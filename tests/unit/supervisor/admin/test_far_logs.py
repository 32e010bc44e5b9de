"""Logs of nodes that do not always answer."""

from __future__ import annotations

from pathlib import Path

from dynamo_local.core.errors import SilentNodeError, SupervisorError
from dynamo_local.supervisor.admin.far_logs import FarLogs
from state.paths import StatePaths


class Silent(FarLogs):
    """The log of a node that answers or not."""

    def __init__(self, root: Path) -> None:
        self.now = 0.0
        super().__init__(StatePaths(root, "far"), lambda: self.now)
        self.asked: list[str] = []
        self.lines = [f"line {number}" for number in range(9)]
        self.answers = True
        self.refused = ""

    async def _read(self, watcher: str, lines: int, after: int | None) -> tuple[tuple[str, ...], int]:
        self.asked.append(watcher)
        if not self.answers:
            raise SilentNodeError("node a does not answer")
        if watcher == self.refused:
            raise SupervisorError("PermissionError: its log")
        return tuple(self.lines[after or 0 :][-lines:]), len(self.lines)


def test_a_log_whose_node_did_not_answer_is_not_shown_from_its_beginning(tmp_path: Path) -> None:
    with Silent(tmp_path) as logs:
        follower = logs.follower("far_VllmWorker")
        logs.answers = False
        assert follower.last_lines(2) == []
        logs.now += 5
        assert follower.new_lines() == []
        logs.answers = True
        logs.now += 5
        assert follower.new_lines() == ["line 7", "line 8"]
        logs.answers = False
        assert follower.new_lines() == []
        logs.lines.append("line 9")
        logs.answers = True
        logs.now += 5
        assert follower.new_lines() == ["line 9"]


def test_a_log_that_begins_meanwhile_is_shown_from_its_beginning(tmp_path: Path) -> None:
    with Silent(tmp_path) as logs:
        assert logs.follower("far_VllmWorker").new_lines() == logs.lines


def test_a_silent_node_is_waited_for_once_and_not_for_each_of_its_logs(tmp_path: Path) -> None:
    with Silent(tmp_path) as logs:
        logs._nodes = {"far_VllmWorker": "a", "far_VllmWorker_1": "a", "far_VllmWorker_2": "b"}
        logs.answers = False
        for watcher in logs._nodes:
            assert logs.read(watcher, 9, 0) == ((), 0)
        assert logs.asked == ["far_VllmWorker", "far_VllmWorker_2"]
        logs.now, logs.answers = 5, True
        for watcher in logs._nodes:
            assert logs.read(watcher, 9, 0)[1] == 9


def test_a_log_that_cannot_be_read_hides_no_other_one_of_its_node(tmp_path: Path) -> None:
    with Silent(tmp_path) as logs:
        logs._nodes = {"far_VllmWorker": "a", "far_VllmWorker_1": "a"}
        logs.refused = "far_VllmWorker"
        assert [logs.read(watcher, 9, 0)[1] for watcher in logs._nodes] == [0, 9]
