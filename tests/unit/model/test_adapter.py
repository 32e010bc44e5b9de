"""A folder without an adapter is told in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dynamo_local.core.errors import UsageError
from dynamo_local.model.adapter import CONFIG, read_rank


def folder(path: Path, config: object, weights: str = "adapter_model.safetensors") -> Path:
    path.mkdir()
    (path / CONFIG).write_text(config if isinstance(config, str) else json.dumps(config))
    (path / weights).touch()
    return path


def test_the_rank_of_an_adapter_is_read(tmp_path: Path) -> None:
    assert read_rank("fr", folder(tmp_path / "a", {"r": 8})) == 8
    assert read_rank("fr", folder(tmp_path / "b", {}, "adapter_model.bin")) == 0


def test_what_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    wrong = {
        tmp_path / "nothing": "does not exist",
        tmp_path / "empty": f"has no {CONFIG}",
        folder(tmp_path / "cut", '{"r":'): f"has no {CONFIG} that can be read",
        folder(tmp_path / "weightless", {"r": 8}, "README.md"): "has none of adapter_model",
    }
    for path, said in wrong.items():
        with pytest.raises(UsageError, match=said) as why:
            read_rank("fr", path)
        assert "\n" not in str(why.value)
