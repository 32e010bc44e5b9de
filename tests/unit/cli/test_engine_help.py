from __future__ import annotations

import pytest

from dynamo_local.cli.serve_output import engine_help
from dynamo_local.core.errors import UsageError
from dynamo_local.engine.vllm.arguments import every_argument


def test_every_option_is_listed() -> None:
    text = engine_help("")
    assert all(f"--{name}" in text for name in every_argument())


def test_a_group_is_found_by_the_beginning_of_its_name() -> None:
    assert engine_help("cache") == engine_help("CacheConfig")
    assert "--gpu-memory-utilization" in engine_help("cache")
    assert "--tensor-parallel-size" not in engine_help("cache")


def test_a_word_finds_options_with_their_short_spelling_and_choices() -> None:
    text = engine_help("tensor_parallel")
    assert "-tp, --tensor-parallel-size N" in text
    assert "{auto,bfloat16," in engine_help("--dtype")


def test_a_refused_option_says_what_to_do_instead() -> None:
    assert "Not taken: use --workers" in engine_help("data-parallel-size")


def test_a_word_that_nothing_has_is_refused() -> None:
    with pytest.raises(UsageError, match="no option of vLLM has 'nonsense'; its groups are"):
        engine_help("nonsense")
