"""`dynamo endpoint`: from words to orders, and without a server."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.cli.endpoint_text import as_json_text, ordered_text
from dynamo_local.cli.main import run
from dynamo_local.control.operations import CREATE_ENDPOINT, UPDATE_ENDPOINT, Operation
from dynamo_local.core.endpoints.checks import read_spec
from dynamo_local.core.endpoints.registry import Registry, create
from dynamo_local.core.messages.endpoints import AdapterOrdered, EndpointStatus, EndpointView
from dynamo_local.supervisor.admin.endpoints import EndpointClient
from state.endpoints.registry import RegistryStore, read_registry
from state.locks import ServerLock
from state.paths import StatePaths

Order = tuple[Operation, str, dict[str, Any] | None]
Typed = Callable[..., Order]


@pytest.fixture(autouse=True)
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StatePaths:
    monkeypatch.delenv("DYN_NAMESPACE", raising=False)
    monkeypatch.setenv("DYN_LOCAL_STATE_DIR", str(tmp_path / "state"))
    (tmp_path / "work" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    return StatePaths(tmp_path / "state", "dynamo")


@pytest.fixture
def ordered(monkeypatch: pytest.MonkeyPatch) -> Typed:
    """Types a command, and returns the order that it would send to the server of namespace here."""
    sent: list[Order] = []

    def order(
        _: EndpointClient, operation: Operation, name: str = "", fields: dict[str, Any] | None = None
    ) -> EndpointView:
        sent.append((operation, name, fields))
        return EndpointView(read_spec({"name": "chat", "model": "m"}), EndpointStatus("ready"), 0.0, 0.0)

    monkeypatch.setattr(EndpointClient, "order", order)

    def typed(*words: str) -> Order:
        assert run(["endpoint", *words, "--namespace", "here"]) == 0
        return sent.pop()

    return typed


@pytest.fixture
def two(paths: StatePaths) -> Registry:
    """Endpoints that were ordered from a server which has ended."""
    registry = Registry()
    for fields in (
        {"name": "chat", "model": "m", "max_workers": 4},
        {"name": "fr", "model": "/l", "adapter_of": "chat"},
    ):
        registry = create(registry, read_spec(fields), 1.0)
    with ServerLock(paths) as lock:
        RegistryStore(lock).write(registry)
    return registry


class TestOrders:
    def test_every_field_has_an_option(self, ordered: Typed, tmp_path: Path) -> None:
        words = "create chat --model ./mine --engine mocker --gpu 0.5 --min-workers 2 --max-workers 4 --disagg "
        words += "--min-prefill-workers 1 --max-prefill-workers 2 --requests-per-worker 8 --policy load --label a=b=c "
        words += "--arg mocker-speedup=2 --max_model_len 4096 -tp 2 --no-enable-prefix-caching --arg revision=1"
        operation, _, fields = ordered(*words.split())
        assert operation == CREATE_ENDPOINT
        assert fields == {
            "name": "chat",
            "model": str(tmp_path / "work" / "mine"),
            "engine": "mocker",
            "args": {
                "max-model-len": 4096,
                "tensor-parallel-size": 2,
                "enable-prefix-caching": False,
                "mocker-speedup": 2,
                "revision": "1",
            },
            "gpu": 0.5,
            "min_workers": 2,
            "max_workers": 4,
            "disaggregated": True,
            "min_prefill_workers": 1,
            "max_prefill_workers": 2,
            "requests_per_worker": 8.0,
            "policy": "load",
            "labels": {"a": "b=c"},
        }

    def test_what_is_not_given_is_not_ordered(self, ordered: Typed) -> None:
        assert ordered("create", "chat", "--model", "a/b") == (CREATE_ENDPOINT, "", {"name": "chat", "model": "a/b"})

    def test_adapters(self, ordered: Typed) -> None:
        order = ordered("create", "fr", "--model", "/lora", "--adapter-of", "chat")
        assert order == (CREATE_ENDPOINT, "", {"name": "fr", "model": "/lora", "adapter_of": "chat"})
        order = ordered("create", "fr", "--model", "/lora", "--adapter-of", "chat", "--roll", "--replace")
        assert order == (
            CREATE_ENDPOINT,
            "",
            {"name": "fr", "model": "/lora", "adapter_of": "chat", "replace": True, "roll": True},
        )
        assert ordered("update", "fr", "--model", "/other", "--roll") == (
            UPDATE_ENDPOINT,
            "fr",
            {"model": "/other", "roll": True},
        )

    def test_what_has_come_of_it_is_said_first(self) -> None:
        view = EndpointView(
            read_spec({"name": "fr", "model": "/lora", "adapter_of": "chat"}),
            EndpointStatus("ready", "served by chat"),
            *(0.0, 0.0),
            adapter=AdapterOrdered("rolled", "chat is rolled: its workers were started without room for adapters"),
        )
        assert ordered_text(view).splitlines() == [
            "chat is rolled: its workers were started without room for adapters",
            "fr is ready: served by chat",
        ]
        assert json.loads(as_json_text(view))["adapter"]["result"] == "rolled"

    def test_an_update_names_what_changes(self, ordered: Typed) -> None:
        words = "update chat --set max_workers=4 --set args.max_model_len=8 --set labels.a=1 --set model=7 --unset gpu"
        assert ordered(*words.split(), "--unset", "args.seed", "--seed", "3", "--replace") == (
            UPDATE_ENDPOINT,
            "chat",
            {
                "args": {"seed": None, "max-model-len": 8},
                "max_workers": 4,
                "labels": {"a": "1"},
                "model": "7",
                "gpu": None,
                "replace": True,
            },
        )

    def test_the_answer_is_json_if_wanted(self, ordered: Typed, capsys: pytest.CaptureFixture[str]) -> None:
        ordered("update", "chat", "--set", "policy=load", "--json")
        shown = json.loads(capsys.readouterr().out)
        assert shown["status"]["state"] == "ready"
        assert shown["spec"]["min_workers"] == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("create", r"NAME \[VLLM_OPTION\]\.\.\. is missing; the usage is `dynamo endpoint create"),
        ("create --seed 3", r"no endpoint is named; write its name first"),
        ("create chat", r"endpoint chat has no model; write model: "),
        ("create chat two --model m", r"'two' is one argument too many; write values as --key=value"),
        ("create Chat --model m", r"'Chat' is no name for an endpoint; use small letters"),
        ("create chat --model m --max-model-lne 3", r"no option --max-model-lne; did you mean --max-model-len\?"),
        ("create chat --model m --port 3", r"--port is not for `dynamo serve`; use "),
        ("create chat --model m --VllmWorker.seed=1", r"has no services to configure by --V.*; write --arg seed=VALUE"),
        ("create chat --model m --arg seed", r"--arg 'seed' has no value; write --arg KEY=VALUE"),
        ("create chat --model m --label =x", r"--label '=x' has no value; write --label KEY=VALUE"),
        ("create chat --model m --gpu nan", r"gpu is nan; write a number of devices"),
        ("create chat --model m --policy best", r"policy is 'best'; write one of concurrency, load"),
        ("create chat --model m --min-workers 3 --max-workers 2", r"max_workers is 2, below min_workers"),
        ("create chat --model m --hf-token abc", r"args\.hf-token looks like a secret"),
        ("create chat --model http://x/y", r"'http://x/y' is an address, not a model"),
        ("create chat --model a.b:C", r"'a\.b:C' is a graph, and an endpoint has a model; name a folder"),
        ("create chat --model m --timeout nan", r"nan is not a finite number; see `dynamo endpoint create --help`"),
        ("update chat", r"nothing is to be changed; name a field: --set max_workers=4"),
        ("update chat --replace", r"nothing is to be changed; name a field"),
        ("update chat --set max_wokers=4", r"no field max_wokers; did you mean max_workers"),
        ("update chat --set max_workers", r"--set 'max_workers' has no value; write --set KEY=VALUE"),
        ("update chat --set gpu.x=4", r"gpu has no parts; write gpu alone"),
        ("update chat --unset best", r"no field best; did you mean labels\?"),
        ("update chat --set max_workers={", r"--set max_workers: .*is not YAML"),
        ("get", r"NAME is missing; the usage is `dynamo endpoint get"),
        ("delete", r"NAME is missing; the usage is `dynamo endpoint delete"),
        ("frob", r"no command dynamo endpoint frob; see `dynamo endpoint --help`"),
        ("lst", r"no command dynamo endpoint lst; did you mean list\?"),
    ],
)
def test_a_mistake_is_said_without_a_server(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["endpoint", *words.split()]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert re.search(said, output.err), output.err
    assert output.err.count("\n") == 1
    assert "abc" not in output.err


class TestWithoutServer:
    def test_what_is_ordered_is_listed(self, two: Registry, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(["endpoint", "list"]) == 0
        output = capsys.readouterr()
        rows = [line.split() for line in output.out.splitlines()]
        assert rows[1:] == [["chat", "-", "-", "1-4", "m"], ["fr", "-", "-", "-", "/l,", "adapter", "of", "chat"]]
        assert "no server runs in namespace dynamo" in output.err

    def test_one_is_shown(self, two: Registry, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(["endpoint", "get", "chat"]) == 0
        assert re.search(r"workers +at least 1, at most 4\n", capsys.readouterr().out)
        assert run(["endpoint", "get", "fr", "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert (shown["status"], shown["spec"]["adapter_of"]) == (None, "chat")

    def test_an_unknown_one_is_answered_with_the_nearest(
        self, two: Registry, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run(["endpoint", "get", "caht"]) == 2
        assert "there is no endpoint 'caht'; did you mean chat?" in capsys.readouterr().err

    @pytest.mark.parametrize("words", ["create x --model m", "update chat --set gpu=1", "delete chat"])
    def test_orders_need_a_server(self, two: Registry, words: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(["endpoint", *words.split()]) == 2
        assert "no server runs; start one" in capsys.readouterr().err

    def test_they_are_dropped_on_request_alone(
        self, two: Registry, paths: StatePaths, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run(["stop"]) == 2
        assert read_registry(paths) == two
        assert run(["stop", "--forget"]) == 0
        assert "dropped the endpoints" in capsys.readouterr().out
        assert read_registry(paths) == Registry()
        assert list(paths.root.iterdir()) == []

    def test_they_are_dropped_even_if_they_cannot_be_read(self, two: Registry, paths: StatePaths) -> None:
        paths.registry_file.write_bytes(b"x")
        paths.registry_copy.unlink()
        assert run(["endpoint", "list"]) == 1
        assert run(["stop", "--forget"]) == 0
        assert not paths.registry_file.exists()
