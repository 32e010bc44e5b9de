"""What the words of `dynamo serve`, and the endpoints of its file, ask for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.cli.main import run
from dynamo_local.cli.words import names_graph
from dynamo_local.core.endpoints.checks import read_spec
from dynamo_local.core.endpoints.registry import Registry, ordered
from dynamo_local.core.errors import UsageError
from state.endpoints.registry import RegistryStore
from state.locks import ServerLock
from state.paths import StatePaths
from tests.unit.adapter_files import adapter

ROOT = Path(__file__).parents[3]

DryRun = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StatePaths:
    for name in ("NATS_SERVER", "NATS_TOKEN", "NATS_CA", "DYN_NAMESPACE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DYN_CPU_SLOTS", "3")
    monkeypatch.setenv("DYN_LOCAL_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("DYN_LOCAL_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "work" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    return StatePaths(tmp_path / "state", "dynamo")


@pytest.fixture
def dry_run(capsys: pytest.CaptureFixture[str]) -> DryRun:
    def typed(*words: str) -> dict[str, Any]:
        assert run(["serve", *words, "--dry-run", "--json"]) == 0
        plan: dict[str, Any] = json.loads(capsys.readouterr().out)
        return plan

    return typed


def file(text: str) -> str:
    Path("models.yaml").write_text(text)
    return "models.yaml"


def store(paths: StatePaths, *names: str) -> None:
    specs = [read_spec({"name": name, "model": "m"}) for name in names]
    with ServerLock(paths) as lock:
        RegistryStore(lock).write(ordered(Registry(), specs, 1.0))


def test_a_file_of_endpoints_needs_no_model(dry_run: DryRun, tmp_path: Path) -> None:
    lora = adapter(tmp_path / "work" / "lora")
    config = file("""
endpoints:
  - {name: chat, model: ./mine, min_workers: 2, args: {max_model_len: 4096, enable_lora: true}}
  - {name: fr, model: ./lora, adapter_of: chat}
Frontend: {max-requests: 7}
""")
    plan = dry_run("-f", config)
    assert [watcher["component"] for watcher in plan["watchers"]] == ["Router", "Planner", "Frontend"]
    assert plan["endpoints"] == [
        {
            "name": "chat",
            "model": str(tmp_path / "work" / "mine"),
            "min_workers": 2,
            "args": {"max-model-len": 4096, "enable-lora": True},
        },
        {"name": "fr", "model": str(lora), "adapter_of": "chat"},
    ]
    config_of = {service["name"]: service["config"] for service in plan["graph"]["services"]}
    assert config_of["Frontend"] == {"max-requests": 7}
    assert config_of["Planner"] == {"no-operation": False, "max-gpu-budget": 3}
    assert not (tmp_path / "state").exists()


def test_options_of_the_http_server_need_no_model(dry_run: DryRun) -> None:
    plan = dry_run("-f", file("endpoints: []"), "--root-path", "/llm", "--ssl-certfile=a", "--enable-ssl-refresh")
    (frontend,) = (service["config"] for service in plan["graph"]["services"] if service["name"] == "Frontend")
    assert frontend == {"root-path": "/llm", "ssl-certfile": "a", "enable-ssl-refresh": True}


def test_what_the_user_says_about_the_planner_holds(dry_run: DryRun) -> None:
    plan = dry_run("-f", file("endpoints: []\nPlanner: {no-operation: true}"), "--Planner.max-gpu-budget=1")
    planner = next(service for service in plan["graph"]["services"] if service["name"] == "Planner")
    assert planner["config"] == {"no-operation": True, "max-gpu-budget": 1}


def test_endpoints_may_stand_beside_a_graph(dry_run: DryRun) -> None:
    config = file("Worker: {seed: 1}\nendpoints:\n  - {name: chat, model: m}")
    plan = dry_run("tests.unit.cli.graph:Front", "-f", config)
    assert [endpoint["name"] for endpoint in plan["endpoints"]] == ["chat"]


def test_the_endpoints_of_the_registry_need_nothing_said(dry_run: DryRun, paths: StatePaths) -> None:
    store(paths, "chat", "code")
    assert [endpoint["name"] for endpoint in dry_run()["endpoints"]] == ["chat", "code"]
    plan = dry_run("-f", file("endpoints:\n  - {name: code, model: other}\n  - {name: new, model: m}"))
    assert [(one["name"], one["model"]) for one in plan["endpoints"]] == [
        ("chat", "m"),
        ("code", "other"),
        ("new", "m"),
    ]
    plan = dry_run("-f", "models.yaml", "--forget")
    assert [endpoint["name"] for endpoint in plan["endpoints"]] == ["code", "new"]


def test_forgotten_endpoints_are_no_reason_to_start(paths: StatePaths, capsys: pytest.CaptureFixture[str]) -> None:
    store(paths, "chat")
    assert run(["serve", "--forget", "--dry-run"]) == 2
    assert "no graph named, and no model" in capsys.readouterr().err


def test_a_file_must_fit_the_registry(paths: StatePaths, capsys: pytest.CaptureFixture[str]) -> None:
    store(paths, "chat", "fr")
    config = file("endpoints:\n  - {name: fr, model: /lora, adapter_of: chat}")
    assert run(["serve", "-f", config]) == 2
    assert "endpoint fr: adapter_of cannot be changed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "endpoints", "said"),
    [
        ((), "{name: a, model: m, min_workers: 9}", r"endpoint a needs 9 CPU slots .* there are 3; lower min_workers"),
        ((), "{name: a, model: m, min_workers: 2}, {name: b, model: m, min_workers: 2}", r"the others need 2 \(b 2\)"),
        (("random", "--cpu-slots", "3"), "{name: a, model: m, min_workers: 3}", r"3 CPU slots .*, and there are 2;"),
        (("random",), "{name: random, model: m}", r"endpoint random: the server's own model is served as random"),
        (("random",), "{name: main, model: m}", "endpoint main: that is the name of a graph's own model; choose"),
        (
            (),
            "{name: a, model: m}, {name: b, model: m, args: {served-model-name: [a]}}",
            r"endpoint a: endpoint b is served as a already; choose another name",
        ),
        ((), "{name: old, model: m}, {name: b, model: m, args: {served-model-name: chat}}", r"endpoint chat is served"),
    ],
)
def test_endpoints_must_fit_each_other_and_the_machine(
    words: tuple[str, ...], endpoints: str, said: str, paths: StatePaths, capsys: pytest.CaptureFixture[str]
) -> None:
    store(paths, "chat")
    assert run(["serve", *words, "-f", file(f"endpoints: [{endpoints}]"), "--dry-run"]) == 2
    assert re.search(said, capsys.readouterr().err)


@pytest.mark.parametrize("words", [(), ("random",)])
def test_an_endpoint_main_that_was_ordered_earlier_is_refused_with_the_remedy(
    words: tuple[str, ...], dry_run: DryRun, paths: StatePaths, capsys: pytest.CaptureFixture[str]
) -> None:
    store(paths, "main")
    assert run(["serve", *words, "--dry-run"]) == 2
    assert "endpoint main was ordered earlier" in capsys.readouterr().err
    dry_run("random", "--forget")


@pytest.mark.parametrize("words", [(), ("tests.unit.cli.graph:Front", "--namespace", "dynamo")])
def test_a_damaged_registry_is_said_before_anything_starts(
    words: tuple[str, ...], paths: StatePaths, capsys: pytest.CaptureFixture[str]
) -> None:
    store(paths, "chat")
    for path in (paths.registry_file, paths.registry_copy):
        path.write_bytes(path.read_bytes()[:-2])
    assert run(["serve", *words]) == 1
    error = capsys.readouterr().err
    assert "the registry of endpoints cannot be read" in error
    assert "--forget" in error
    assert error.count("\n") == 1


def test_the_text_shows_endpoints(capsys: pytest.CaptureFixture[str]) -> None:
    config = file("endpoints:\n  - {name: chat, model: m, max_workers: 4, gpu: 0.5, args: {seed: 3}}")
    assert run(["serve", "-f", config, "--dry-run"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["chat", "m", "1-4", "0.5", "seed=3"] in rows


def slots(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """The number of CPU slots, and the lines that are said about it."""
    assert run(["serve", *words, "--dry-run"]) == 0
    shown = capsys.readouterr()
    found = re.search(r"^devices +(\d+) of kind cpu-slot", shown.out, re.MULTILINE)
    assert found is not None
    return int(found[1]), shown.err


def test_the_example_can_be_served_on_two_cores(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("DYN_CPU_SLOTS")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    number, said = slots(capsys, "-f", str(ROOT / "examples" / "models.yaml"))
    assert number == 4
    assert said.startswith("4 CPU slots, which share 2 cores: 3 for the workers at the start, 1 for updates and more")
    assert said.count("\n") == 1
    assert slots(capsys, "-f", str(ROOT / "examples" / "models.yaml"), "--cpu-slots", "7") == (7, "")


def test_beside_a_model_there_are_slots_for_endpoints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("DYN_CPU_SLOTS")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    config = file("endpoints: [{name: a, model: m, engine: mocker}, {name: b, model: m, engine: mocker}]")
    assert slots(capsys, "random", "-f", config)[0] == 4


def test_paths_of_models_begin_at_the_file(dry_run: DryRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "work" / file("endpoints: [{name: a, model: ./mine}, {name: b, model: mine}]")
    monkeypatch.chdir(tmp_path)
    models = [endpoint["model"] for endpoint in dry_run("-f", str(config))["endpoints"]]
    assert models == [str(tmp_path / "work" / "mine")] * 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("endpoint: [{name: a, model: m}]", "the key endpoint means nothing; write `endpoints:`"),
        ("Endpoints: [{name: a, model: m}]", "the key Endpoints means nothing"),
        ("- {name: a, model: m}", "models.yaml is a list; write `endpoints:` in a line above it"),
        ("endpoints:", r"nothing is listed under endpoints; .*, or `endpoints: \[\]`"),
        ("endpoints:\n  a: {model: m}", "endpoints is not a list; write `endpoints:` with"),
        ("endpoints:\n  - name: a\n  model: m", "line 3, column 3 is not YAML"),
        (
            "endpoints: [{name: a, model: ./none}]",
            r"endpoints\[0\]: model ./none is no folder in .*work; write its path",
        ),
        ("endpoints: [{name: Qwen/Qwen3-0.6B, model: m}]", "inner hyphens, at most 40 characters, such as qwen3-0-6b"),
        (
            "endpoints: [{name: a, model: m, max-model-len: 9}]",
            r"goes under args: \{max-model-len: ...\}; the fields are",
        ),
        ("endpoints: [{name: a, model: m, args: {seeed: 1}}]", "endpoint a: args.seeed: no service of the graph has"),
        ("endpoints: [{name: a, model: m, min_workers: '2'}]", "min_workers is '2'; write a whole number"),
        ("endpoints: [{name: a, model: m}, {name: a, model: m}]", "endpoint a is given twice; rename one of them"),
    ],
)
def test_mistakes_in_a_file_are_one_line(text: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "-f", file(text)]) == 2
    error = capsys.readouterr().err
    assert re.search(said, error)
    assert error.count("\n") == 1


def test_on_a_cluster_the_nodes_have_the_devices(
    dry_run: DryRun, paths: StatePaths, capsys: pytest.CaptureFixture[str]
) -> None:
    # More than this machine has.
    config = file("endpoints: [{name: chat, model: ./mine, min_workers: 5}]")
    plan = dry_run("-f", config, "--environment", "ray", "--kv-network", "10.1.2.0/24")
    config_of = {service["name"]: service["config"] for service in plan["graph"]["services"]}
    assert config_of["Planner"]["max-gpu-budget"] > 1000
    assert run(["serve", "-f", config, "--environment", "ray", "--kv-network", "10.1.2.1/24", "--dry-run"]) == 2
    assert "--kv-network must be an IPv4 network such as" in capsys.readouterr().err
    both = ["--kv-network", "10.1.2.0/24", "--kv-stream"]
    assert run(["serve", "-f", config, "--environment", "ray", *both, "--dry-run"]) == 2
    assert "--kv-network and --kv-stream exclude each other" in capsys.readouterr().err
    store(paths, "chat")
    adapter = file("endpoints: [{name: fr, model: ./mine, adapter_of: chat}]")
    assert run(["serve", "-f", adapter, "--environment", "ray", "--dry-run"]) == 2
    assert "adapter fr cannot be served on a cluster: its nodes are not told of adapters" in capsys.readouterr().err


# What can be a model, and what a graph.


@pytest.mark.parametrize(
    "text",
    [
        "Qwen/Qwen3-0.6B",
        "gpt2",
        "org/name@main",
        "./mine",
        "/models/mine",
        "~/mine",
        "a/b/c",
        "smollm2",
        "Qwen2.5-0.5B",
    ],
)
def test_folders_ids_and_names_are_models(text: str) -> None:
    assert not names_graph(text)


@pytest.mark.parametrize("text", ["examples.llm.graphs.agg:Frontend", "graph:Front", "a.b:", "examples.llm.graphs.agg"])
def test_modules_are_graphs(text: str) -> None:
    assert names_graph(text)


def test_a_folder_is_a_model_whatever_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("graph:Front", "v1.5", "a.b"):
        (tmp_path / name).mkdir()
        assert not names_graph(name)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("https://huggingface.co/Qwen/Qwen3-0.6B", "is an address, not a model; write Qwen/Qwen3-0.6B$"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B/tree/main", "write Qwen/Qwen3-0.6B$"),
        ("https://example.com/model", "is an address, not a model; give a folder"),
        ("C:\\models\\mine", "a path of Windows"),
        ("C:/models/mine", "a path of Windows"),
        ("qwen3:0.6b", "names with a tag are Ollama's"),
        ("org/name:tag", "no model and no graph"),
        ("no model", "is no model"),
        ("", "is no model"),
    ],
)
def test_what_is_neither_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        names_graph(text)
