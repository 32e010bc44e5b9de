"""`dynamo serve MODEL`: what is explained and what is refused, before anything is started."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.cli.main import run
from dynamo_local.model.named.random_model import random_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the model `random`."""
    return random_model(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, four CPU slots, and a state folder that is not made yet."""
    for name in ("NATS_SERVER", "NATS_TOKEN", "NATS_CA", "DYN_NAMESPACE", "VLLM_CPU_KVCACHE_SPACE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DYN_CPU_SLOTS", "4")
    monkeypatch.setenv("DYN_LOCAL_CACHE_DIR", str(model.parent.parent))
    monkeypatch.setenv("DYN_LOCAL_STATE_DIR", str(tmp_path / "state"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path


def explained(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(["serve", *arguments, "--explain", "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert isinstance(document["chosen"], list)
    document["settings"] = {one["setting"]: one["value"] for one in document["chosen"]}
    return document


def configs(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, object]]:
    assert run(["serve", *arguments, "--dry-run", "--json"]) == 0
    return {each["name"]: each["config"] for each in json.loads(capsys.readouterr().out)["graph"]["services"]}


def test_a_model_is_served_by_a_graph_with_router_and_planner(capsys: pytest.CaptureFixture[str]) -> None:
    found = configs(capsys, "random", "--workers", "2")
    assert set(found) == {"VllmWorker", "Router", "Planner", "Frontend"}
    assert found["Planner"]["no-operation"] is True
    for service in ("VllmWorker", "Frontend"):
        assert found[service]["max-model-len"] == 8192
        assert found[service]["dtype"] == "float32"
        assert found[service]["served-model-name"] == ["random"]
        assert Path(str(found[service]["model"])).is_dir()


def test_prefill_workers_make_the_graph_disaggregated(capsys: pytest.CaptureFixture[str]) -> None:
    document = explained(capsys, "random", "--disagg", "--prefill-workers", "2")
    assert document["workers"] == {"VllmWorker": 1, "PrefillWorker": 2}
    assert document["settings"]["kv-transfer"] is True


def test_the_planner_acts_within_the_devices(capsys: pytest.CaptureFixture[str]) -> None:
    settings = explained(capsys, "random", "--planner")["settings"]
    assert isinstance(settings, dict)
    assert (settings["no-operation"], settings["max-gpu-budget"], settings["min-gpu-budget"]) == (False, 4, 1)


def test_each_setting_has_a_reason_and_what_is_given_is_not_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--max-model-len", "1024", "--VllmWorker.block-size=16", "--tool-call-parser", "hermes")
    document = explained(capsys, "random", *given)
    assert isinstance(document["chosen"], list)
    assert all(one["reason"] for one in document["chosen"])
    assert not {"max-model-len", "block-size", "tool-call-parser"} & set(document["settings"])


def test_options_reach_the_services_that_read_them(capsys: pytest.CaptureFixture[str]) -> None:
    found = configs(capsys, "random", "--max-model-len=1024", "--max-num-seqs=8", "--chat-template", "/t", "--seed=3")
    assert found["Frontend"]["max-model-len"] == found["VllmWorker"]["max-model-len"] == 1024
    assert found["VllmWorker"]["max-num-seqs"] == 8
    assert "max-num-seqs" not in found["Frontend"]
    assert found["Frontend"]["chat-template"] == "/t"
    assert "chat-template" not in found["VllmWorker"]
    # A key of the planner's has the same name as this argument of vLLM's.
    found = configs(capsys, "random", "--served-model-name", "one", "two")
    assert found["Frontend"]["served-model-name"] == ["one", "two"]
    assert "served-model-name" not in found["Planner"]


def test_an_option_of_one_service_wins_over_that_of_all_and_over_the_file(
    capsys: pytest.CaptureFixture[str], machine: Path
) -> None:
    file = machine / "settings.yaml"
    file.write_text("VllmWorker: {max-num-seqs: 1, seed: 1, block-size: 64}\n")
    options = ("--VllmWorker.max-num-seqs=3", "--max-num-seqs=2", "--seed=2")
    worker = configs(capsys, "random", "-f", str(file), *options)["VllmWorker"]
    assert (worker["max-num-seqs"], worker["seed"], worker["block-size"]) == (3, 2, 64)


@pytest.mark.parametrize("target", [("random",), ("examples.hello_world.hello_world:Frontend",), ("-f", "models.yaml")])
def test_a_variable_that_acts_behind_the_gate_is_refused_at_the_start(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, target: tuple[str, ...]
) -> None:
    Path("models.yaml").write_text("endpoints: [{name: chat, model: random, engine: mocker}]\n")
    for mode in ((), ("--dry-run",)):
        for name, remedy in (
            ("VLLM_API_KEY", "dynamo key create"),
            ("VLLM_ENABLE_RESPONSES_API_STORE", "leave it out"),
        ):
            monkeypatch.setenv(name, "1")
            assert run(["serve", *target, *mode, "--port", "0"]) == 2
            told = capsys.readouterr().err.splitlines()[-1]
            assert told.startswith(f"error: the environment variable {name} is not for `dynamo serve`; ")
            assert remedy in told
            monkeypatch.delenv(name)


def test_a_variable_is_refused_in_the_settings_of_an_endpoint(capsys: pytest.CaptureFixture[str]) -> None:
    args = "Frontend: {ServiceArgs: {envs: {VLLM_SERVER_DEV_MODE: 1}}}"
    Path("models.yaml").write_text(f"endpoints: [{{name: chat, model: random, args: {{{args}}}}}]\n")
    assert run(["serve", "-f", "models.yaml", "--dry-run"]) == 2
    told = capsys.readouterr().err
    assert "endpoint chat: " in told
    assert "Frontend.ServiceArgs.envs.VLLM_SERVER_DEV_MODE is not for `dynamo serve`" in told


def test_parsers_are_chosen_for_a_folder_unless_switched_off(
    capsys: pytest.CaptureFixture[str], machine: Path, model: Path
) -> None:
    folder = machine / "mine"
    shutil.copytree(model, folder)
    template = '{% for tool in tools %}<tool_call>{"name": 1}</tool_call>{% endfor %}'
    (folder / "chat_template.jinja").write_text(template)
    found = configs(capsys, str(folder))
    assert found["Frontend"]["enable-auto-tool-choice"] is True
    assert found["Frontend"]["tool-call-parser"] == "hermes"
    assert found["Frontend"]["served-model-name"] == ["mine"]
    assert "tool-call-parser" not in configs(capsys, str(folder), "--no-auto-parsers")["Frontend"]
    graph = ("examples.llm.graphs.agg:Frontend", "--model", str(folder), "--explain", "--json")
    assert run(["serve", *graph]) == 0
    chosen = {one["setting"]: one["value"] for one in json.loads(capsys.readouterr().out)["chosen"]}
    assert chosen == {"enable-auto-tool-choice": True, "tool-call-parser": "hermes", "reasoning-parser": None}


GRAPH = "examples.llm.graphs.agg:Frontend"


@pytest.mark.parametrize(
    ("arguments", "said", "code"),
    [
        (["random", "random"], "'random' is one argument too many", 2),
        (["random", "--model", "other"], "two models are named, random and other; leave out --model", 2),
        ([], "no graph named, and no model", 2),
        (["random", "--workers", "0"], "0 is not in the range", 2),
        (["random", "--workers", "9"], "worker 5 of 9 of VllmWorker needs 1 device, 0 of 4 CPU slots are free", 2),
        (["random", "--max-model-len", "32k"], "max-model-len 32000 is more than the model has: .* ends at 8192", 2),
        (
            ["random", "--max-model-len", "9000000000", '--hf-overrides={"max_position_embeddings": 9000000000}'],
            "the model does not fit: .* GiB of KV cache for 9000000000",
            2,
        ),
        (["random", "--kv-cache-memory-bytes", "9000G"], "a KV cache of 9000.0 GiB does not fit", 2),
        (["random", "--max-model-len", "[1"], "--max-model-len: .*is not YAML", 2),
        (["random", "--max-num-seqs", "many"], "--max-num-seqs: VllmWorker.max-num-seqs is 'many'; expected int", 2),
        (["random", "--dtype", "int4"], "--dtype: .* expected one of auto", 2),
        (["random", "--disagg", "--no-enable-prefix-caching"], "prefix caching is off; leave out --disagg", 2),
        (["random", "--PrefillWorker.seed=1"], "the graph has no service PrefillWorker", 2),
        (["random", "--json"], "--json goes with --explain and --dry-run only", 2),
        (["random", "--explain", "--dry-run"], "print different things", 2),
        ([GRAPH, "--workers", "2"], "--workers goes with a model.*--VllmWorker.ServiceArgs.workers=N", 2),
        ([GRAPH, "--planner"], "--planner goes with a model.*--Planner.no-operation=false", 2),
        (["examples.hello_world.hello_world:Frontend", "--seed=1"], "no service of the graph has this setting", 2),
        (["/no/such/folder"], "there is no folder /no/such/folder", 2),
        (["-dph"], "--data-parallel-hybrid-lb is not for `dynamo serve`", 2),
        (["--help-engine", "nonsense"], "no option of vLLM has 'nonsense'", 2),
    ],
)
def test_mistakes(
    capsys: pytest.CaptureFixture[str], machine: Path, arguments: list[str], said: str, code: int
) -> None:
    assert run(["serve", *arguments, "--port=0"]) == code
    captured = capsys.readouterr()
    assert re.search(said, captured.err), captured.err
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert not (machine / "state").exists()


HALF = "--VllmWorker.ServiceArgs.resources.gpu=0.5"


def test_workers_with_shares_have_their_part_of_the_memory_in_a_graph_too(capsys: pytest.CaptureFixture[str]) -> None:
    graph = ("examples.llm.graphs.agg:Frontend", "--model", "random", "--VllmWorker.ServiceArgs.workers=4")
    chosen = explained(capsys, *graph, HALF)["settings"]
    assert {"kv-cache-memory-bytes", "max-model-len"} <= set(chosen)
    # Neither the planner nor anything else of the graph is decided on.
    assert not {"no-operation", "max-num-seqs", "dtype", "cpu-slots"} & set(chosen)
    assert "kv-cache-memory-bytes" not in explained(capsys, *graph)["settings"]


def test_a_model_is_served_on_shares_of_devices(capsys: pytest.CaptureFixture[str]) -> None:
    settings = explained(capsys, "random", "--workers", "2", HALF, "--planner")["settings"]
    assert settings["max-gpu-budget"] == 4
    assert run(["serve", "random", "--workers", "3", HALF, "--dry-run", "--json"]) == 0
    watchers = json.loads(capsys.readouterr().out)["watchers"]
    held = [(one["devices"], one["share"]) for one in watchers if one["component"] == "VllmWorker"]
    assert held == [([0], 0.5), ([0], 0.5), ([1], 0.5)]
    assert run(["serve", "random", "--workers", "9", HALF, "--dry-run"]) == 2
    assert "worker 9 of 9 of VllmWorker needs 0.5 of a device, no CPU slot of 4 has" in capsys.readouterr().err
