"""Keys on which frontend and workers must agree: given once, to any of them, they reach all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.errors import ConfigError
from dynamo_local.engine.vllm.arguments import AGREED, engine_schema
from dynamo_local.sdk.config.configuration import resolve
from dynamo_local.sdk.config.resolved import ResolvedGraph
from dynamo_local.sdk.graph import Graph, load_graph

DISAGG = load_graph("examples.llm.graphs.disagg:Frontend")
SIDES = ("Frontend", "VllmWorker", "PrefillWorker")


def resolved(*overrides: str, file: Path | None = None, graph: Graph = DISAGG) -> ResolvedGraph:
    return resolve(graph, file, overrides)


def values(graph: ResolvedGraph, key: str) -> dict[str, Any]:
    return {service.name: service.config.get(key) for service in graph.services if service.name in SIDES}


@pytest.mark.parametrize("side", SIDES)
def test_a_reasoning_parser_reaches_all_whoever_it_was_given_to(side: str) -> None:
    assert values(resolved(f"--{side}.reasoning-parser=qwen3"), "reasoning-parser") == dict.fromkeys(SIDES, "qwen3")


@pytest.mark.parametrize("side", SIDES)
def test_or_in_common(tmp_path: Path, side: str) -> None:
    file = tmp_path / "graph.yaml"
    file.write_text(f"Common: {{reasoning-parser: qwen3}}\n{side}: {{common-configs: [reasoning-parser]}}\n")
    assert values(resolved(file=file), "reasoning-parser") == dict.fromkeys(SIDES, "qwen3")


def test_what_is_said_twice_alike_is_said_once() -> None:
    graph = resolved("--Frontend.reasoning-parser=qwen3", "--VllmWorker.reasoning-parser=qwen3")
    assert values(graph, "reasoning-parser") == dict.fromkeys(SIDES, "qwen3")


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        (
            "Frontend.reasoning-parser=qwen3",
            "VllmWorker.reasoning-parser=deepseek_r1",
            "VllmWorker.reasoning-parser is 'deepseek_r1' and Frontend.reasoning-parser is 'qwen3'",
        ),
        (
            "Frontend.structured-outputs-config.backend=xgrammar",
            "VllmWorker.structured-outputs-config.backend=guidance",
            "VllmWorker.structured-outputs-config.backend is 'guidance' and "
            "Frontend.structured-outputs-config.backend is 'xgrammar'",
        ),
        (
            "Frontend.reasoning-parser=qwen3",
            "VllmWorker.structured-outputs-config.reasoning_parser=glm45",
            "VllmWorker.structured-outputs-config.reasoning_parser is 'glm45' and Frontend.reasoning-parser is 'qwen3'",
        ),
        (
            "PrefillWorker.tokenizer=a",
            "VllmWorker.tokenizer=b",
            "VllmWorker.tokenizer is 'b' and PrefillWorker.tokenizer is 'a'",
        ),
    ],
)
def test_a_real_difference_is_refused_in_one_line(one: str, other: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(f"--{one}", f"--{other}")
    assert all(words in caught.value.cause for words in told.split(" and "))
    assert "\n" not in str(caught.value)


def test_a_mapping_may_be_said_in_parts() -> None:
    graph = resolved(
        "--Frontend.structured-outputs-config.backend=guidance",
        "--VllmWorker.structured-outputs-config.disable_any_whitespace=true",
    )
    whole = {"backend": "guidance", "disable_any_whitespace": True}
    assert values(graph, "structured-outputs-config") == dict.fromkeys(SIDES, whole)


def test_other_keys_stay_where_they_are() -> None:
    graph = resolved("--Frontend.max-logprobs=5", "--VllmWorker.max-num-seqs=7")
    assert values(graph, "max-logprobs") == {"Frontend": 5, "VllmWorker": None, "PrefillWorker": None}
    assert values(graph, "max-num-seqs") == {"Frontend": None, "VllmWorker": 7, "PrefillWorker": None}


def test_what_is_to_be_agreed_on_exists() -> None:
    assert {path.partition(".")[0] for path in AGREED} <= {*engine_schema().keys(), "grammar-timeout-s"}


said = st.dictionaries(st.sampled_from(SIDES), st.sampled_from(["a", "b"]), max_size=3)


@given(said)
def test_all_have_the_one_value_or_there_is_none(said: dict[str, str]) -> None:
    options = [f"--{side}.reasoning-parser={value}" for side, value in said.items()]
    if len(set(said.values())) > 1:
        with pytest.raises(ConfigError):
            resolved(*options)
        return
    expected = next(iter(said.values()), None)
    assert values(resolved(*options), "reasoning-parser") == dict.fromkeys(SIDES, expected)
