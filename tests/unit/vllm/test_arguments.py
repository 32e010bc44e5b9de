"""Options of `vllm serve` and variables that are no settings here are refused, with what to do instead."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from dynamo_local.core.errors import ConfigError
from dynamo_local.engine.vllm.arguments import MANAGED, REFUSED_VARIABLES
from dynamo_local.engine.vllm.launch import with_log
from dynamo_local.sdk.config.configuration import resolve
from dynamo_local.sdk.config.schema import check_variables
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


@pytest.mark.parametrize("service", ["Frontend", "VllmWorker"])
def test_variables_are_refused_in_the_environment_of_a_service(graph: Graph, service: str) -> None:
    for name in REFUSED_VARIABLES:
        with pytest.raises(ConfigError, match=rf"{service}\.ServiceArgs\.envs\.{name} is not for") as caught:
            resolve(graph, overrides=[f"--{service}.ServiceArgs.envs.{name}=secret"])
        assert caught.value.remedy == REFUSED_VARIABLES[name].remedy
        assert "secret" not in str(caught.value)
    resolve(graph, overrides=[f"--{service}.ServiceArgs.envs.VLLM_SERVER_DEV_MODE=0"])


@pytest.mark.parametrize(
    ("name", "value", "refused"),
    [
        ("VLLM_API_KEY", "0", True),
        ("VLLM_API_KEY", "", False),
        ("VLLM_SERVER_DEV_MODE", "True", True),
        ("VLLM_SERVER_DEV_MODE", "false", False),
        ("VLLM_DP_SIZE", "1", False),
        ("VLLM_DP_SIZE", "2", True),
        ("VLLM_ENABLE_V1_MULTIPROCESSING", "0", True),
        ("VLLM_PORT", "tcp://10.0.0.1:8000", True),
        ("VLLM_CPU_KVCACHE_SPACE", "1", False),
    ],
)
def test_a_variable_is_refused_with_a_value_that_changes_something(name: str, value: str, refused: bool) -> None:
    expected = pytest.raises(ConfigError, match=f"variable {name} is not for") if refused else nullcontext()
    with expected:
        check_variables({name: value}, REFUSED_VARIABLES)


def test_what_nobody_knows_is_guessed_at(graph: Graph) -> None:
    with pytest.raises(ConfigError, match="did you mean max-model-len"):
        resolve(graph, overrides=["--Frontend.max-modl-len=1"])


@pytest.mark.parametrize(
    ("config", "level"),
    [
        ({}, None),
        ({"enable-logging-iteration-details": True}, "INFO"),
        ({"enable-logging-iteration-details": False}, None),
        ({"enable-logging-iteration-details": True, "log-level": "ERROR"}, "ERROR"),
        ({"enable-logging-iteration-details": True, "log-config-file": "a.json"}, None),
    ],
)
def test_what_is_to_be_logged_is_logged_unless_a_level_is_given(config: dict[str, Any], level: str | None) -> None:
    assert with_log(config) == config | ({} if level is None else {"log-level": level})
