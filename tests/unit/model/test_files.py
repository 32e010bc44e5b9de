"""Files of a model that were replaced are known to be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dynamo_local.core.errors import ConfigError
from dynamo_local.model.weights import (
    MODEL_FILES_ENV,
    check_model_files,
    contents_identity,
    files_identity,
    read_identity,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_text("old")
    return tmp_path / "model"


def test_a_file_that_was_replaced_is_another(folder: Path) -> None:
    before = files_identity(folder)
    assert files_identity(folder) == before
    (folder / "weights").write_text("new")
    os.utime(folder / "weights", ns=(0, 0))
    assert files_identity(folder) != before


def test_between_machines_contents_are_compared(folder: Path, tmp_path: Path) -> None:
    """A copy is the same, and another content is another one, also with the same size and time."""
    other = tmp_path / "copy"
    other.mkdir()
    (other / "weights").write_text("old")
    assert contents_identity(other) == contents_identity(folder)
    (other / "weights").write_text("new")
    for one in (folder, other):
        os.utime(one / "weights", ns=(1, 1))
    assert files_identity(other) == files_identity(folder)
    assert contents_identity(other) != contents_identity(folder)
    (other / "weights").rename(other / "other")
    (other / "other").write_text("old")
    assert contents_identity(other) != contents_identity(folder)


def test_a_worker_loads_only_what_its_revision_was_checked_with(folder: Path) -> None:
    config, environ = {"model": str(folder)}, {MODEL_FILES_ENV: files_identity(folder)}
    check_model_files(config, environ)
    (folder / "tokenizer").touch()
    with pytest.raises(ConfigError, match="are others than when") as caught:
        check_model_files(config, environ)
    assert "\n" not in str(caught.value)
    # Workers of the graph itself, and those with a model from elsewhere, are not marked.
    check_model_files(config, {})
    check_model_files({}, environ)


def test_a_folder_that_cannot_be_read_is_one_line(folder: Path) -> None:
    (folder / "weights").unlink()
    folder.rmdir()
    with pytest.raises(ConfigError, match="cannot be read: No such file") as caught:
        read_identity(str(folder))
    assert "\n" not in str(caught.value)
