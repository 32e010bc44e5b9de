"""A folder without an adapter that its base takes is told in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dynamo_local.core.errors import UsageError
from dynamo_local.model.adapter import CONFIG, check_adapter


def folder(path: Path, config: object, weights: str = "adapter_model.safetensors") -> Path:
    path.mkdir()
    (path / CONFIG).write_text(config if isinstance(config, str) else json.dumps(config))
    (path / weights).touch()
    return path


def test_an_adapter_is_let_through(tmp_path: Path) -> None:
    check_adapter("fr", folder(tmp_path / "a", {"r": 8}), 8)
    check_adapter("fr", folder(tmp_path / "b", {}, "adapter_model.bin"), 8)


def test_what_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    wrong = {
        tmp_path / "nothing": "does not exist",
        tmp_path / "empty": f"has no {CONFIG}",
        folder(tmp_path / "cut", '{"r":'): f"has no {CONFIG} that can be read",
        folder(tmp_path / "weightless", {"r": 8}, "README.md"): "has none of adapter_model",
        folder(tmp_path / "large", {"r": 9}): "has rank 9, and its base takes 8 at most; raise max-lora-rank",
    }
    for path, said in wrong.items():
        with pytest.raises(UsageError, match=said) as why:
            check_adapter("fr", path, 8)
        assert "\n" not in str(why.value)
