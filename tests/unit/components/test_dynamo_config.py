"""Configurations with the keys of Dynamo's example graphs, resolved for the graphs of the same names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from components.dynamo_config import from_dynamo
from dynamo_local.core.errors import ConfigError
from dynamo_local.sdk import load_graph
from dynamo_local.sdk.config.configuration import resolve
from dynamo_local.sdk.config.resolved import ResolvedGraph

MODEL = "some/model"
ONE_GPU = {"workers": 1, "resources": {"gpu": 1}}
CONNECTOR = json.dumps({"kv_connector": "DynamoNixlConnector"})
COMMON = {"model": MODEL, "block-size": 64, "max-model-len": 4096}
FRONTEND = {"served_model_name": MODEL, "endpoint": "dynamo.Processor.chat/completions", "port": 8000}
PLANNER = {"environment": "kubernetes"}
REMOTE: dict[str, Any] = {
    "remote-prefill": True,
    "conditional-disagg": True,
    "max-local-prefill-length": 10,
    "max-prefill-queue-size": 2,
    "ServiceArgs": ONE_GPU,
    "common-configs": ["model", "block-size", "max-model-len", "kv-transfer-config"],
}
PREFILL: dict[str, Any] = {
    "max-num-batched-tokens": 4096,
    "ServiceArgs": ONE_GPU,
    "common-configs": ["model", "block-size", "max-model-len", "kv-transfer-config"],
}
ROUTED = {**COMMON, "router": "kv", "kv-transfer-config": CONNECTOR}

# What the files of v0.3 have: examples/llm/configs of https://github.com/ai-dynamo/dynamo.
FILES: dict[str, dict[str, Any]] = {
    "agg": {
        "Common": COMMON,
        "Frontend": FRONTEND,
        "Processor": {
            "router": "round-robin",
            "router-num-threads": 4,
            "common-configs": ["model", "block-size", "max-model-len"],
        },
        "VllmWorker": {
            "enforce-eager": True,
            "max-num-batched-tokens": 4096,
            "enable-prefix-caching": True,
            "ServiceArgs": ONE_GPU,
            "common-configs": ["model", "block-size", "max-model-len"],
        },
        "Planner": PLANNER,
    },
    "agg_router": {
        "Common": ROUTED,
        "Frontend": FRONTEND,
        "Processor": {"common-configs": ["model", "block-size", "max-model-len", "router"]},
        "Router": {"min-workers": 1, "common-configs": ["model", "router"]},
        "VllmWorker": {
            "tensor-parallel-size": 1,
            "ServiceArgs": {"workers": 1, "resources": {"gpu": 1, "cpu": "10", "memory": "20Gi"}},
            "common-configs": ["model", "block-size", "max-model-len", "router", "kv-transfer-config"],
        },
        "Planner": PLANNER,
    },
    "disagg": {
        "Common": {**COMMON, "kv-transfer-config": CONNECTOR},
        "Frontend": FRONTEND,
        "Processor": {"router": "round-robin", "common-configs": ["model", "block-size"]},
        "VllmWorker": REMOTE,
        "PrefillWorker": PREFILL,
        "Planner": {"environment": "local", "no-operation": False, "log-dir": "log/planner"},
    },
    "disagg_router": {
        "Common": ROUTED,
        "Frontend": FRONTEND,
        "Processor": {"common-configs": ["model", "block-size", "max-model-len", "router"]},
        "Router": {"min-workers": 1, "common-configs": ["model", "router"]},
        "VllmWorker": {**REMOTE, "common-configs": [*REMOTE["common-configs"], "router"]},
        "PrefillWorker": PREFILL,
        "Planner": PLANNER,
    },
}


def resolved(tmp_path: Path, graph: str, tree: dict[str, Any], *options: str) -> ResolvedGraph:
    path = tmp_path / "dynamo.yaml"
    path.write_text(json.dumps(tree))  # JSON is YAML
    return resolve(load_graph(f"examples.llm.graphs.{graph}:Frontend"), path, options)


@pytest.mark.parametrize("graph", FILES)
def test_a_configuration_of_dynamo_is_resolved(graph: str, tmp_path: Path) -> None:
    found = resolved(tmp_path, graph, FILES[graph])
    frontend, worker = found.service("Frontend").config, found.service("VllmWorker").config
    assert frontend["served-model-name"] == [MODEL]
    for config in (frontend, worker):
        assert (config["model"], config["block-size"], config["max-model-len"]) == (MODEL, 64, 4096)
    assert worker.get("kv-transfer", False) == (graph != "agg")
    if graph.startswith("disagg"):
        assert (frontend["max-local-prefill-length"], frontend["max-prefill-queue-size"]) == (10, 2)
        assert found.service("PrefillWorker").config["kv-transfer"]


@pytest.mark.parametrize("graph", FILES)
def test_each_key_that_is_not_taken_has_a_note_of_one_line(graph: str, tmp_path: Path) -> None:
    notes = resolved(tmp_path, graph, FILES[graph]).notes
    assert all("\n" not in note for note in notes)
    told = "\n".join(notes)
    for section, values in FILES[graph].items():
        for key in {"router", "router-num-threads", "min-workers", "endpoint"} & set(values):
            assert f"{'Frontend' if section == 'Processor' else section}.{key} is ignored: " in told
    assert ("Planner.environment is ignored: " in told) == (FILES[graph]["Planner"] is PLANNER)
    assert ("VllmWorker.ServiceArgs.resources.memory is ignored" in told) == (graph == "agg_router")


@pytest.mark.parametrize(
    ("keys", "length", "size"),
    [
        ({"remote-prefill": True, "conditional-disagg": True, "max-local-prefill-length": 7}, 7, None),
        ({"remote-prefill": True, "conditional-disagg": False}, 0, 10_000),
        ({"remote-prefill": False, "max-prefill-queue-size": 5}, None, 0),
    ],
)
def test_remote_prefill_is_what_the_limits_of_the_frontend_say(
    keys: dict[str, Any], length: int | None, size: int | None, tmp_path: Path
) -> None:
    frontend = resolved(tmp_path, "disagg", {"VllmWorker": keys}).service("Frontend").config
    assert (frontend.get("max-local-prefill-length"), frontend.get("max-prefill-queue-size")) == (length, size)


def test_our_own_key_of_the_frontend_goes_before_the_worker_s(tmp_path: Path) -> None:
    tree = {"Frontend": {"max-local-prefill-length": 3}, "VllmWorker": {"max-local-prefill-length": 7}}
    assert resolved(tmp_path, "disagg", tree).service("Frontend").config == {"max-local-prefill-length": 3}


def test_options_are_read_likewise(tmp_path: Path) -> None:
    options = ("--Processor.router=random", "--VllmWorker.max_local_prefill_length=9", "--Processor.max-model-len=99")
    found = resolved(tmp_path, "disagg", {}, *options)
    assert found.service("Frontend").config == {"max-local-prefill-length": 9, "max-model-len": 99}
    assert "Frontend.router is ignored" in "\n".join(found.notes)


@pytest.mark.parametrize("graph", FILES)
def test_our_own_configurations_have_no_notes(graph: str) -> None:
    path = Path(__file__).parents[3] / "examples" / "llm" / "configs" / f"{graph}.yaml"
    assert resolve(load_graph(f"examples.llm.graphs.{graph}:Frontend"), path).notes == ()


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"Processor": {"rooter": "kv"}}, r"Frontend has no key rooter"),
        ({"Procesor": {"router": "kv"}}, r"the graph has no service Procesor"),
        ({"Processor": "kv"}, r"the graph has no service Processor"),
        ({"VllmWorker": {"remote-prefil": True}}, r"VllmWorker has no key remote-prefil"),
        ({"VllmWorker": {"max-local-prefill-length": "ten"}}, r"Frontend.max-local-prefill-length is 'ten'"),
        ({"Planner": {"environment": "slurm"}}, r"Planner.environment is 'slurm'.*local"),
        ({"Frontend": {"common-configs": "model"}, "Processor": {}}, r"common-configs is not a list"),
    ],
)
def test_mistakes_are_still_refused_in_one_line(tree: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        resolved(tmp_path, "disagg", tree)
    assert "\n" not in str(refused.value)


def test_the_configuration_that_was_given_is_not_changed() -> None:
    before = json.dumps(FILES)
    for tree in FILES.values():
        from_dynamo(tree)
    assert json.dumps(FILES) == before
