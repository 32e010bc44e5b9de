"""What is shown of a whole graph: mockers behind the real frontend, with a planner that observes."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import TENSORS, EventAccumulator

from tests.e2e.llm_server import PATIENCE_S, LlmServer
from tests.integration.server_process import eventually

DASHBOARD = Path(__file__).resolve().parents[3] / "docs" / "dashboards" / "dynamo-local.json"
MODEL = "random"
REQUESTS = 6
PROMPT = list(range(1, 101))
"""Longer than what decode workers prefill themselves, here."""
TOKENS = 20

Series = dict[str, dict[tuple[str, ...], float]]


@pytest.fixture(scope="module")
def log_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("planner")


@pytest.fixture(scope="module")
def monitored(turn: str, tmp_path_factory: pytest.TempPathFactory, log_dir: Path) -> Iterator[LlmServer]:
    options = [
        "examples.llm.graphs.disagg:Frontend",
        "--file=examples/llm/configs/disagg.yaml",
        f"--model={MODEL}",
        "--VllmWorker.engine=mocker",
        "--PrefillWorker.engine=mocker",
        "--Frontend.max-local-prefill-length=64",
        f"--Planner.log-dir={log_dir}",
        "--Planner.adjustment-interval=1",
        "--Planner.metric-pulling-interval=0.2",
    ]
    with LlmServer(tmp_path_factory.mktemp("monitored") / "state", "monitored", options) as server:
        server.await_ready()
        server.await_workers(2)
        yield server


@pytest.fixture(scope="module")
def graph(monitored: LlmServer) -> LlmServer:
    return monitored


@pytest.fixture(scope="module")
def elsewhere(graph: LlmServer) -> int:
    """The graph has answered something, and so many prompts of it were prefilled elsewhere: all of them, unless a
    worker did not answer for a while on a busy machine."""
    for number in range(REQUESTS):
        body = {"model": MODEL, "prompt": [number, *PROMPT], "max_tokens": TOKENS, "ignore_eos": True}
        answer = httpx.post(f"{graph.url}/v1/completions", json=body, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
    return round(series(graph)["dynamo_prefills_total"][(MODEL, "prefilled elsewhere")])


def series(graph: LlmServer) -> Series:
    """By name, then by the values of the labels in the order of their names."""
    text = httpx.get(f"{graph.url}/metrics", timeout=PATIENCE_S).text
    found: Series = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(sample.labels[name] for name in sorted(sample.labels))
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


def once(graph: LlmServer, holds: Callable[[Series], bool]) -> Series:
    """The first figures of which that holds. Processes tell of themselves twice a second."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds(found := series(graph)):
        assert time.monotonic() < deadline, found
        time.sleep(0.1)
    return found


def decided(found: Series) -> bool:
    """The planner's first interval is over."""
    return found.get("dynamo_planner_acts") == {(): 0}


def test_one_endpoint_tells_of_every_process(graph: LlmServer, elsewhere: int) -> None:
    decode, prefill = (MODEL, "decode", "monitored_VllmWorker"), (MODEL, "prefill", "monitored_PrefillWorker")
    watchers = {f"monitored_{name}" for name in ("Frontend", "Router", "Planner", "VllmWorker", "PrefillWorker")}
    # The first token of each such prompt comes from the prefill worker.
    tokens = {prefill: elsewhere, decode: REQUESTS * TOKENS - elsewhere}
    assert elsewhere > 0

    def complete(found: Series) -> bool:
        told = found.get("dynamo_worker_output_tokens_total", {})
        everybody = {labels[-1] for labels in found["dynamo_process_state"]} == watchers
        return everybody and decided(found) and all(told.get(who, 0) >= count for who, count in tokens.items())

    found = once(graph, complete)
    # Some may have been generated twice, by a worker that was not heard of for a while; not all of them.
    assert all(found["dynamo_worker_output_tokens_total"][who] < 2 * count for who, count in tokens.items())
    assert found["dynamo_worker_prompt_tokens_total"][prefill] > elsewhere * len(PROMPT) / 2
    for name in ("running_requests", "waiting_requests", "kv_usage_ratio", "kv_pinned_ratio", "kv_blocks"):
        assert found[f"dynamo_worker_{name}"].keys() == {decode, prefill}
    assert found["dynamo_workers"] == {(MODEL, "decode"): 1, (MODEL, "prefill"): 1}
    assert found["dynamo_router_assignments_total"][("assigned", "kv")] >= REQUESTS
    assert found["dynamo_prefill_queue_jobs"].keys() == {(MODEL, "waiting"), (MODEL, "in_hand")}


@pytest.mark.usefixtures("elsewhere")
def test_everything_that_the_dashboard_asks_for_is_there(graph: LlmServer) -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    # There are no endpoints here, and no request was held.
    asked = re.compile(r"(?:dynamo_(?!endpoint|frontend_hold_)|vllm:)[a-z_]+")
    wanted = {name for text in expressions for name in asked.findall(text)}
    # Decisions are there after the planner's first interval.
    once(graph, lambda found: wanted <= found.keys())


@pytest.mark.usefixtures("elsewhere")
def test_top_shows_workers_requests_and_the_planner(graph: LlmServer) -> None:
    states = {"monitored_VllmWorker": "ready", "monitored_PrefillWorker": "ready"}

    found: dict[str, Any] = {}

    def complete() -> bool:
        """It shows what it has heard in two seconds."""
        found.update(json.loads(graph.command("top", "--json")))
        heard = {row["watcher"]: row["state"] for row in found["workers"]} == states
        return heard and bool(found["frontend"] and found["planner"] and found["planner"]["decisions"])

    eventually(complete, "not all is shown", PATIENCE_S)
    assert found["frontend"]["in_flight"] == 0
    assert found["planner"]["policy"] == "load"
    assert found["planner"]["acts"] is False
    line = re.compile(r"planner load  2 of \d+ devices  only observes")
    eventually(lambda: line.search(graph.command("top", "--once")) is not None, "no planner is shown", PATIENCE_S)


@pytest.mark.usefixtures("elsewhere")
def test_event_files_tell_what_the_planner_saw_and_decided(graph: LlmServer, log_dir: Path) -> None:
    once(graph, decided)
    (folder,) = (path for path in log_dir.iterdir() if path.is_dir())
    deadline = time.monotonic() + PATIENCE_S
    while True:
        events = EventAccumulator(str(folder), size_guidance={TENSORS: 0})
        events.Reload()
        if "decisions/all" in events.Tags()["tensors"]:
            break
        assert time.monotonic() < deadline, events.Tags()
        time.sleep(0.2)
    assert events.Scalars("workers/decode_routable")[-1].value == 1
    assert events.Scalars("devices/held")[-1].value == 2
    for tag in ("queue/waiting_per_prefill_worker", "kv_usage/mean_decode", "running/monitored_VllmWorker"):
        assert tag in events.Tags()["scalars"]
    text = events.Tensors("decisions/all")[-1].tensor_proto.string_val[0].decode()
    assert "devices 2 of" in text
    written = [json.loads(line) for line in (log_dir / "decisions.jsonl").read_text().splitlines()]
    assert len(written) >= len(events.Tensors("decisions/all"))
