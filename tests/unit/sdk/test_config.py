from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dynamo_local.core.errors import ConfigError
from dynamo_local.sdk import Graph, load_graph
from dynamo_local.sdk.config.configuration import resolve
from dynamo_local.sdk.config.resolved import ResolvedGraph
from dynamo_local.sdk.graph import build_graph
from tests.unit.sdk.graphs.roles import Boss, Front, Helper, Worker

HERE = "tests.unit.sdk.graphs"
NEEDED = ["--Router.model=tiny"]


@pytest.fixture
def graph() -> Graph:
    return load_graph(f"{HERE}.routed:Frontend")


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        path = tmp_path / "c.yaml"
        path.write_text(text)
        return path

    return write


def config(resolved: ResolvedGraph, service: str = "Worker") -> dict[str, Any]:
    return resolved.service(service).config


def test_without_a_file_the_decorator_decides(graph: Graph) -> None:
    resolved = resolve(graph, overrides=NEEDED)
    worker = resolved.service("Worker")
    assert resolved.target == f"{HERE}.routed:Frontend"
    assert resolved.namespace == "shop"
    assert resolved.root.name == "Frontend"
    assert (worker.target, worker.role) == (f"{HERE}.services:Worker", "decode")
    assert (worker.workers, worker.gpu, worker.cpu) == (2, 2, 0.5)
    assert (worker.config, worker.envs, worker.depends_on) == ({}, {}, ())
    assert resolved.root.depends_on == ("Router",)


def test_the_command_line_beats_the_file_beats_the_decorator(graph: Graph, write: Any) -> None:
    path = write(
        "Router: {model: a}\n"
        "Worker:\n"
        "  max_num_seqs: 16\n"
        "  gpu-share: 1\n"
        "  ServiceArgs: {workers: 3, resources: {gpu: 1}, envs: {A: file, B: 010}}\n"
    )
    resolved = resolve(
        graph,
        path,
        ["--Worker.max-num-seqs=64", "--Worker.ServiceArgs.workers=4", "--Worker.ServiceArgs.envs.A=line"],
        namespace="mine",
    )
    worker = resolved.service("Worker")
    assert worker.config == {"max-num-seqs": 64, "gpu-share": 1.0}
    assert (worker.workers, worker.gpu, worker.cpu) == (4, 1, 0.5)
    assert worker.envs == {"A": "line", "B": "010"}
    assert resolved.namespace == "mine"


def test_common_goes_to_those_who_ask_and_own_keys_win(graph: Graph, write: Any) -> None:
    path = write(
        "Common: {model: shared, block-size: 32}\n"
        "Router: {common-configs: [model, block_size]}\n"
        "Worker: {common-configs: [model], model: own}\n"
        "Frontend:\n"
    )
    resolved = resolve(graph, path)
    assert config(resolved, "Router") == {"model": "shared", "block-size": 32}
    assert config(resolved) == {"model": "own"}
    resolved = resolve(graph, path, ["--Common.model=typed"])
    assert config(resolved) == {"model": "typed"}


def test_the_model_goes_to_those_who_ask_for_it_in_common(graph: Graph, write: Any) -> None:
    path = write("Router: {common-configs: [model]}\nWorker: {model: own}\n")
    resolved = resolve(graph, path, model="given")
    assert (config(resolved, "Router"), config(resolved)) == ({"model": "given"}, {"model": "own"})


def test_the_model_goes_to_all_who_have_one_when_nobody_asks(graph: Graph) -> None:
    resolved = resolve(graph, model="given")
    assert config(resolved, "Router") == config(resolved) == {"model": "given"}


def test_an_own_option_beats_model(graph: Graph) -> None:
    assert config(resolve(graph, overrides=["--Worker.model=x"], model="given")) == {"model": "x"}


def test_options_merge_deeply_into_mappings(graph: Graph, write: Any) -> None:
    path = write("Router: {model: a}\nWorker: {extra: {a: {b: 1, c: 2}, d: 3}}\n")
    options = [
        "--Worker.extra.a.b=[4]",
        "--Worker.extra='{e: 5}'".replace("'", ""),
        "--Worker.extra.a.f_g=x y",
    ]
    assert config(resolve(graph, path, options)) == {"extra": {"a": {"b": [4], "c": 2, "f_g": "x y"}, "d": 3, "e": 5}}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--Worker.eager", {"eager": True}),
        ("--Worker.eager=false", {"eager": False}),
        ("--Worker.gpu-share=1e-3", {"gpu-share": 0.001}),
        ("--Worker.model=7", {"model": "7"}),
        ("--Worker.model=1.10", {"model": "1.10"}),
        ("--Worker.model=no", {"model": "no"}),
        ("--Worker.model=!x #[", {"model": "!x #["}),
        ("--Worker.model='7 '", {"model": "7 "}),
        ("--Worker.model=null", {"model": "null"}),
        ("--Worker.model=", {"model": ""}),
        ("--Worker.model=a=b.c", {"model": "a=b.c"}),
        ("--Worker.revision=null", {"revision": None}),
        ("--Worker.dtype=float32", {"dtype": "float32"}),
        ("--Worker.stop=[a, b]", {"stop": ["a", "b"]}),
        ("--Worker.extra={a: 2024-01-01}", {"extra": {"a": "2024-01-01"}}),
    ],
)
def test_values_of_options_are_yaml(graph: Graph, option: str, value: dict[str, Any]) -> None:
    assert config(resolve(graph, overrides=[*NEEDED, option])) == value


def test_the_last_of_two_equal_options_wins(graph: Graph) -> None:
    options = ["--Worker.max-num-seqs=1", "--Worker.max_num_seqs=2"]
    assert config(resolve(graph, overrides=[*NEEDED, *options])) == {"max-num-seqs": 2}


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--Workr.x=1", "--Workr.x: the graph has no service Workr; did you mean Worker?"),
        ("--Prefill.x=1", "--Prefill.x: the graph has no service Prefill; it has Worker, Router, Frontend"),
        (
            "--Worker.max-num-seq=1",
            "--Worker.max-num-seq: Worker has no key max-num-seq; did you mean max-num-seqs?",
        ),
        ("--Frontend.zzz=1", "--Frontend.zzz: Frontend has no key zzz; allowed are ServiceArgs"),
        ("--Worker.max-num-seqs=abc", "--Worker.max-num-seqs: Worker.max-num-seqs is 'abc'; expected int"),
        ("--Worker.max-num-seqs=1.5", "--Worker.max-num-seqs: Worker.max-num-seqs is 1.5; expected int"),
        ("--Worker.max-num-seqs=true", "--Worker.max-num-seqs: Worker.max-num-seqs is True; expected int"),
        ("--Worker.max-num-seqs", "--Worker.max-num-seqs has no value; write --Worker.max-num-seqs=VALUE"),
        (
            "--Worker.max-num-seqs.a=1",
            "--Worker.max-num-seqs.a: Worker.max-num-seqs is {'a': 1}; expected int",
        ),
        ("--Worker.eager=yes", "--Worker.eager: Worker.eager is 'yes'; expected bool"),
        ("--Worker.gpu-share=.inf", "--Worker.gpu-share: Worker.gpu-share is '.inf'; expected float"),
        ("--Worker.gpu-share=1e999", "--Worker.gpu-share: Worker.gpu-share is inf; expected numbers, "),
        ("--Worker.dtype=half", "--Worker.dtype: Worker.dtype is 'half'; expected one of auto, float32"),
        ("--Worker.revision.a=1", "--Worker.revision.a: Worker.revision is {'a': 1}; expected str or null"),
        ("--Worker.extra={1: 2}", "--Worker.extra: Worker.extra is {1: 2}; expected text as keys"),
        ("--Worker.stop=[a", "--Worker.stop: line 1, column"),
        ("--Worker.extra={a: 1, a: 2}", "--Worker.extra: line 1, column 8 is not YAML: key 'a' occurs twice"),
        ("--Worker.ServiceArgs.worker=2", "Worker.ServiceArgs has no key worker; did you mean workers?"),
        ("--Worker.ServiceArgs.workers=0", "Worker.ServiceArgs.workers is 0; expected int of at least 1"),
        (
            "--Worker.ServiceArgs.resources.gpu=1.5",
            "whole number of devices, or a share of one such as 0.5, of at least",
        ),
        ("--Worker.ServiceArgs.resources.gpu=0.001", "a share of one such as 0.5, of at least 0.01, not 0.001"),
        ("--Worker.ServiceArgs.resources.gpu=-0.5", "resources.gpu must be a whole number of devices"),
        ("--Worker.ServiceArgs.resources.gpu=nan", "resources.gpu must be a whole number of devices"),
        ("--Worker.ServiceArgs.resources.tpu=1", "resources has no 'tpu'; allowed are gpu, cpu"),
        ("--Worker.ServiceArgs=2", "--Worker.ServiceArgs: Worker.ServiceArgs is not a mapping"),
        (
            "--Worker.common-configs=model",
            "Worker.common-configs is not a list of keys; write it as [key, key]",
        ),
        ("--Worker.common-configs=[modle]", "lists modle, Worker has no such key; did you mean model?"),
        ("--Common.model=x", "--Common.model: no service takes Common.model; list it in"),
        ("--Worker=1", "option --Worker is not understood; write --Service.key=value"),
        ("--Worker..x=1", "option --Worker..x is not understood"),
        ("Worker.x=1", "option Worker.x is not understood"),
    ],
)
def test_a_wrong_option_is_one_line_that_names_it(graph: Graph, option: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(graph, overrides=[*NEEDED, option])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Workr: {}", "c.yaml: the graph has no service Workr; did you mean Worker?"),
        ("Worker: {max-num-seqs: x}", "c.yaml: Worker.max-num-seqs is 'x'; expected int"),
        ("Worker: {max-num-seqs: 1, max_num_seqs: 2}", "c.yaml: Worker.max-num-seqs is given twice"),
        (
            "Worker: {eager: true, eager: false}",
            "c.yaml: line 1, column 23 is not YAML: key 'eager' occurs twice",
        ),
        ("Worker: [1]", "c.yaml: Worker is not a mapping"),
        ("- 1", "c.yaml: not a mapping of services"),
        ("Worker: {a", "c.yaml: line 1, column 11 is not YAML"),
        ("a: !!python/object:os.system x", "c.yaml: line 1, column 4 is not YAML: could not determine"),
        (
            "Common: {model: 5}\nRouter: {common-configs: [model]}",
            "Router.model (from Common) is 5; expected str",
        ),
        ("Common: {a: 5}", "c.yaml: no service takes Common.a; list it in the common-configs of one"),
        (
            "Worker: {ServiceArgs: {envs: {A: true}}}",
            "Worker.ServiceArgs.envs.A is not text; put its value in quotes",
        ),
        ("Worker: {ServiceArgs: {envs: {'A=B': x}}}", "envs.A=B is not a variable's name"),
        ("", "Router needs model; set it in the file or with --Router.model=VALUE"),
        ("Router: {model: a, block-size: 9223372036854775808}", "expected integers of at most 64 bits"),
        ("x: &a [*a]", "line 1, column 4 is not YAML: found unconstructable recursive node"),
    ],
)
def test_a_wrong_file_is_one_line_that_names_it(graph: Graph, write: Any, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(graph, write(text))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(graph: Graph, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read configuration .*nope\.yaml: No such file"):
        resolve(graph, tmp_path / "nope.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="it is not UTF-8 text"):
        resolve(graph, tmp_path / "binary.yaml")


def test_a_model_that_nobody_takes_is_an_error() -> None:
    with pytest.raises(ConfigError, match="--model: no service of the graph has a model"):
        resolve(load_graph(f"{HERE}.services:Prefill"), model="x")


@pytest.mark.parametrize("namespace", ["", "a.b", "x" * 41])
def test_a_bad_namespace_is_refused(graph: Graph, namespace: str) -> None:
    with pytest.raises(ConfigError, match="is not valid"):
        resolve(graph, overrides=NEEDED, namespace=namespace)


def test_no_error_shows_a_secret(graph: Graph, write: Any) -> None:
    secret = "sesame-opens"
    wrong = [
        f"Worker: {{api-key: [{secret}]}}",
        f"Worker: {{ServiceArgs: {{envs: {{TOKEN: [{secret}]}}}}}}",
        f"Worker: {{ServiceArgs: {{envs: {secret}}}}}",
        f"Worker: {{ServiceArgs: {{envs: {{TOKEN: '{secret}}}}}",
        f"Worker: {{max-num-seqs: 'https://me:{secret}@host'}}",
    ]
    for text in wrong:
        with pytest.raises(ConfigError) as caught:
            resolve(graph, write(text))
        assert secret not in str(caught.value)
    for option in (f"--Worker.api-key.x={secret}", f"--Worker.ServiceArgs.envs={secret}"):
        with pytest.raises(ConfigError) as caught:
            resolve(graph, overrides=[*NEEDED, option])
        assert secret not in str(caught.value)


@pytest.mark.parametrize(
    ("others", "role"),
    [((), "worker"), ((Helper,), "leader"), ((Boss,), "follower"), ((Boss, Helper), "leader")],
    ids=str,
)
def test_a_role_may_depend_on_who_else_is_there(others: tuple[type, ...], role: str) -> None:
    """The first role that the decorator names and the graph has decides."""
    graph = build_graph(f"{HERE}.roles:Front", Front, [(Front, other) for other in (Worker, *others)])
    resolved = resolve(graph)
    assert resolved.service("Worker").role == role
    assert ResolvedGraph.from_json(resolved.to_json()).service("Worker").role == role
