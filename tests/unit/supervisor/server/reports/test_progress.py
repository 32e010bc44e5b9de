from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Mapping
from types import MappingProxyType

import pytest

from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.fleet.view import Change, Happened
from dynamo_local.core.messages.endpoints import EndpointState, EndpointStatus, EndpointView
from dynamo_local.core.messages.presence import EngineInfo, Load, Presence, ProcessState
from dynamo_local.supervisor.server.reports.progress import Progress, ready_lines
from tests.unit.supervisor.recording import RecordingReport

ENGINE = EngineInfo("mocker", "tiny", 1024, 16, 100, 8)


def presence(watcher: str, state: ProcessState, detail: str = "", lease: str = "l", role: str = "service") -> Presence:
    return Presence(watcher, watcher.split("_")[1], role, lease, 1, state, detail)


class Followed:
    def __init__(self, *expected: str, importing: Mapping[str, str] = MappingProxyType({})) -> None:
        self.report = RecordingReport()
        self.ready: list[str] = []
        self.progress = Progress(expected, self.report, self.ready.append, importing)

    def hear(self, told: Presence, what: Happened = Happened.UPDATED) -> None:
        self.progress.on_change(Change(what, told))


@pytest.fixture
def followed() -> Followed:
    return Followed("ns_A", "ns_B")


def test_one_line_for_each_change_of_state_and_none_for_load(followed: Followed) -> None:
    followed.hear(presence("ns_A", "ready"))
    followed.hear(Presence("ns_A", "A", "service", "l", 1, "ready", load=Load(running=1)))
    followed.hear(presence("ns_A", "draining"))
    assert followed.report.lines == ["ns_A  ready", "ns_A  draining"]


def test_what_services_do_as_they_start_is_told_together_and_no_line_each(followed: Followed) -> None:
    followed.hear(presence("ns_A", "starting"))
    followed.hear(presence("ns_A", "starting", "loading the model"))
    followed.hear(presence("ns_B", "starting", "loading the model"))
    assert followed.report.lines == []
    assert followed.progress.awaited() == "A, B (loading the model)"


def test_a_process_that_starts_later_is_told_of_once(followed: Followed) -> None:
    followed.hear(presence("ns_A", "ready", lease="1"))
    followed.hear(presence("ns_B", "ready", lease="1"))
    before = len(followed.report.lines)
    followed.hear(presence("ns_A", "starting", lease="2"))
    followed.hear(presence("ns_A", "starting", "loading the model", lease="2"))
    followed.hear(presence("ns_A", "ready", lease="2"))
    assert followed.report.lines[before:] == ["ns_A  starting", "ns_A  ready"]


def test_ready_means_all_that_are_expected(followed: Followed) -> None:
    followed.hear(presence("ns_A", "ready"))
    followed.hear(presence("ns_Stranger", "ready"))
    assert not followed.progress.all_ready.is_set()
    assert followed.progress.not_ready() == "B (its process starts)"
    followed.hear(presence("ns_B", "ready"))
    assert followed.progress.all_ready.is_set()
    assert followed.ready == ["ns_A", "ns_Stranger", "ns_B"]


def test_one_that_left_is_not_ready(followed: Followed) -> None:
    followed.hear(presence("ns_A", "ready", lease="1"))
    followed.hear(presence("ns_A", "ready", lease="1"), Happened.LEFT)
    followed.hear(presence("ns_B", "failed", "no such model"))
    assert followed.progress.not_ready() == "A (its process starts), B (failed: no such model)"


def test_a_worker_that_left_because_it_failed_is_told_of(followed: Followed) -> None:
    followed.hear(presence("ns_A", "starting", role="decode"))
    followed.hear(presence("ns_A", "failed", "no such model", role="decode"), Happened.LEFT)
    assert followed.report.lines[-1] == "ns_A  failed: no such model"
    assert followed.progress.not_ready() == "A (failed: no such model), B (its process starts)"


def test_a_late_farewell_does_not_hide_the_successor(followed: Followed) -> None:
    followed.hear(presence("ns_A", "ready", lease="2"))
    followed.hear(presence("ns_A", "ready", lease="1"), Happened.LEFT)
    assert followed.progress.not_ready() == "B (its process starts)"


def test_the_summary_names_model_and_workers() -> None:
    followed = Followed("ns_A", "ns_B", "ns_F")
    for name in ("ns_A", "ns_B"):
        followed.hear(Presence(name, "A", "aggregated", name, 1, "ready", engine=ENGINE))
    followed.hear(presence("ns_F", "ready"))
    assert followed.progress.summary() == "model tiny, 2 workers"


def test_the_summary_names_prefill_workers_apart() -> None:
    followed = Followed("ns_D", "ns_P")
    followed.hear(Presence("ns_D", "D", "decode", "d", 1, "ready", engine=ENGINE))
    followed.hear(Presence("ns_P", "P", "prefill", "p", 1, "ready", engine=ENGINE))
    assert followed.progress.summary() == "model tiny, 1 worker, 1 prefill worker"


def test_the_summary_of_a_graph_without_workers_counts_processes(followed: Followed) -> None:
    followed.hear(presence("ns_A", "ready"))
    assert followed.progress.summary() == "1 service process"


class AwaitedReport(RecordingReport):
    """Hands over what is awaited as it is reported."""

    def __init__(self) -> None:
        super().__init__()
        self.awaited: asyncio.Queue[str] = asyncio.Queue()

    def pending(self, text: str) -> None:
        self.awaited.put_nowait(text)


async def test_what_is_awaited_is_shown_while_nothing_else_is_reported() -> None:
    report = AwaitedReport()
    progress = Progress(("ns_A", "ns_B"), report, lambda watcher: None)
    waiting = asyncio.create_task(progress.wait(quiet_s=0.001))
    for _ in range(2):
        assert await report.awaited.get() == "waiting for A, B (its process starts)"
    progress.on_change(Change(Happened.UPDATED, presence("ns_A", "ready")))
    progress.on_change(Change(Happened.UPDATED, presence("ns_B", "starting", "loading weights")))
    while (text := await report.awaited.get()) == "waiting for A, B (its process starts)":
        """Reported before the changes."""
    assert text == "waiting for B (loading weights)"
    progress.on_change(Change(Happened.UPDATED, presence("ns_B", "ready")))
    await waiting


def test_what_a_process_imports_is_shown_until_it_announces_itself() -> None:
    followed = Followed("ns_A", "ns_B", importing={"ns_A": "vllm"})
    assert followed.progress.awaited() == "A (importing vLLM); B (its process starts)"
    followed.hear(presence("ns_A", "starting"))
    assert followed.progress.awaited() == "A (starting); B (its process starts)"


def test_the_lines_at_the_end_say_what_to_do_next() -> None:
    first, *others = ready_lines("http://h:1", "model it's, 1 worker", ["it's"])
    assert first == "API ready at http://h:1 (model it's, 1 worker)"
    words = shlex.split("\n".join(others).partition("try it")[2].partition("\n  look")[0])
    assert words[:2] == ["curl", "http://h:1/v1/chat/completions"]
    assert json.loads(words[-1])["model"] == "it's"
    assert "dynamo stop" in others[-1]


@pytest.mark.parametrize(
    ("tasks", "path"),
    [
        (("embed", "token_embed"), "/v1/embeddings"),
        (("classify", "token_classify"), "/classify"),
        (("token_classify",), "/pooling"),
        (("generate", "transcription"), "/v1/chat/completions"),
    ],
)
def test_the_example_is_of_something_that_the_model_does(tasks: tuple[str, ...], path: str) -> None:
    lines = ready_lines("http://h:1", "", ["m"], tasks)
    words = shlex.split("\n".join(lines).partition("try it")[2].partition("\n  look")[0])
    assert words[1] == f"http://h:1{path}"
    assert json.loads(words[-1])["model"] == "m"


def test_a_model_without_an_example_has_none() -> None:
    assert "curl" not in "\n".join(ready_lines("http://h:1", "", ["m"], ("plugin",)))


def test_without_an_api_there_is_nothing_to_call() -> None:
    assert ready_lines(None, "2 service processes", [])[0] == "all services ready (2 service processes)"
    assert "curl" not in "\n".join(ready_lines(None, "", ["tiny"]))


def endpoint(name: str, state: EndpointState) -> EndpointView:
    return EndpointView(EndpointSpec(name=name, model="m"), EndpointStatus(state), 1.0, 2.0)


def test_endpoints_are_named_with_their_states_and_the_first_ready_one_is_asked() -> None:
    found = [endpoint("chat", "starting"), endpoint("story", "ready"), endpoint("code", "ready")]
    text = "\n".join(ready_lines("http://h:1", "3 service processes", [], endpoints=found))
    assert "models   chat (starting), story (ready), code (ready)\n" in text
    assert "dynamo endpoint list" in text
    words = shlex.split(text.partition("try it")[2].partition("\n  look")[0])
    assert json.loads(words[-1])["model"] == "story"
    # The graph's own model is ready before.
    own = "\n".join(ready_lines("http://h:1", "model tiny, 1 worker", ["tiny"], endpoints=found))
    assert '"model": "tiny"' in own


def test_while_no_endpoint_is_ready_the_list_of_models_is_asked_for() -> None:
    found = [endpoint(f"model-{number}", "fetching") for number in range(20)]
    text = "\n".join(ready_lines("http://h:1", "3 service processes", [], endpoints=found))
    assert "curl http://h:1/v1/models" in text
    assert "chat/completions" not in text
    assert "model-7 (fetching), and 12 more\n" in text
    assert "endpoint" not in "\n".join(ready_lines("http://h:1", "model tiny, 1 worker", ["tiny"]))
