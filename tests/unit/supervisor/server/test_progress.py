from __future__ import annotations

import pytest

from dynamo_local.core.fleet.view import Change, Happened
from dynamo_local.core.messages.presence import EngineInfo, Load, Presence, ProcessState
from dynamo_local.supervisor.server.progress import Progress
from tests.unit.supervisor.recording import RecordingReport

ENGINE = EngineInfo("mocker", "tiny", 1024, 16, 100, 8)


def presence(watcher: str, state: ProcessState, detail: str = "", lease: str = "l", role: str = "service") -> Presence:
    return Presence(watcher, watcher.split("_")[1], role, lease, 1, state, detail)


class Followed:
    def __init__(self, *expected: str) -> None:
        self.report = RecordingReport()
        self.ready: list[str] = []
        self.progress = Progress(expected, self.report, self.ready.append)

    def hear(self, told: Presence, what: Happened = Happened.UPDATED) -> None:
        self.progress.on_change(Change(what, told))


@pytest.fixture
def followed() -> Followed:
    return Followed("ns_A", "ns_B")


def test_one_line_for_each_change_of_state_or_detail_and_none_for_load(followed: Followed) -> None:
    followed.hear(presence("ns_A", "starting", "loading"))
    followed.hear(Presence("ns_A", "A", "service", "l", 1, "starting", "loading", load=Load(running=1)))
    followed.hear(presence("ns_A", "starting", "warming up"))
    followed.hear(presence("ns_A", "ready"))
    assert followed.report.lines == ["ns_A  starting: loading", "ns_A  starting: warming up", "ns_A  ready"]


def test_ready_means_all_that_are_expected(followed: Followed) -> None:
    followed.hear(presence("ns_A", "ready"))
    followed.hear(presence("ns_Stranger", "ready"))
    assert not followed.progress.all_ready.is_set()
    assert followed.progress.not_ready() == "ns_B (not heard of)"
    followed.hear(presence("ns_B", "ready"))
    assert followed.progress.all_ready.is_set()
    assert followed.ready == ["ns_A", "ns_Stranger", "ns_B"]


def test_one_that_left_is_not_ready(followed: Followed) -> None:
    followed.hear(presence("ns_A", "ready", lease="1"))
    followed.hear(presence("ns_A", "ready", lease="1"), Happened.LEFT)
    followed.hear(presence("ns_B", "failed", "no such model"))
    assert followed.progress.not_ready() == "ns_A (not heard of), ns_B (failed: no such model)"


def test_a_worker_that_left_because_it_failed_is_told_of(followed: Followed) -> None:
    followed.hear(presence("ns_A", "starting", role="decode"))
    followed.hear(presence("ns_A", "failed", "no such model", role="decode"), Happened.LEFT)
    assert followed.report.lines[-1] == "ns_A  failed: no such model"
    assert followed.progress.not_ready() == "ns_A (failed: no such model), ns_B (not heard of)"


def test_a_late_farewell_does_not_hide_the_successor(followed: Followed) -> None:
    followed.hear(presence("ns_A", "ready", lease="2"))
    followed.hear(presence("ns_A", "ready", lease="1"), Happened.LEFT)
    assert followed.progress.not_ready() == "ns_B (not heard of)"


def test_the_summary_names_model_and_workers() -> None:
    followed = Followed("ns_A", "ns_B", "ns_F")
    for name in ("ns_A", "ns_B"):
        followed.hear(Presence(name, "A", "aggregated", name, 1, "ready", engine=ENGINE))
    followed.hear(presence("ns_F", "ready"))
    assert followed.progress.summary() == "model tiny, 2 workers"


def test_the_summary_of_a_graph_without_workers_counts_processes(followed: Followed) -> None:
    followed.hear(presence("ns_A", "ready"))
    assert followed.progress.summary() == "1 service process"
