"""Options of `vllm serve` that are no settings here are refused, with what to do instead."""

from __future__ import annotations

import pytest

from dynamo_local.core.errors import ConfigError
from dynamo_local.engine.vllm.arguments import MANAGED
from dynamo_local.sdk.config.configuration import resolve
from dynamo_local.sdk.graph import Graph, load_graph


@pytest.fixture(scope="module")
def graph() -> Graph:
    return load_graph("examples.llm.graphs.agg:Frontend")


@pytest.mark.parametrize("key", sorted(MANAGED))
@pytest.mark.parametrize("service", ["Frontend", "VllmWorker"])
def test_what_is_fixed_says_so_and_guesses_nothing(graph: Graph, service: str, key: str) -> None:
    for option in (f"--{service}.{key}=1", f"--{service}.common-configs=[{key}]"):
        if option == "--Frontend.port=1":
            continue  # Dynamo's spelling of --port: tests/unit/cli/test_dynamo_spelling.py
        with pytest.raises(ConfigError) as caught:
            resolve(graph, overrides=[option])
        assert caught.value.cause.endswith("dynamo-local sets it")
        assert caught.value.remedy == MANAGED[key]


def test_what_nobody_knows_is_guessed_at(graph: Graph) -> None:
    with pytest.raises(ConfigError, match="did you mean max-model-len"):
        resolve(graph, overrides=["--Frontend.max-modl-len=1"])
