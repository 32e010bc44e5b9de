"""Targets of `dynamo serve`: graphs, models, and what is neither."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_local.cli.serving.target import Target, parse_target
from dynamo_local.core.errors import UsageError


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
    assert parse_target(text) == Target(text, is_graph=False)


@pytest.mark.parametrize("text", ["examples.llm.graphs.agg:Frontend", "graph:Front", "a.b:", "examples.llm.graphs.agg"])
def test_modules_are_graphs(text: str) -> None:
    assert parse_target(text) == Target(text, is_graph=True)


def test_a_folder_is_a_model_whatever_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("graph:Front", "v1.5", "a.b"):
        (tmp_path / name).mkdir()
        assert not parse_target(name).is_graph


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
        parse_target(text)
