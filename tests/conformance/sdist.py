"""vLLM's source distribution, fetched with pip: its tests are in no wheel."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from dynamo_local.core.errors import DynamoError
from tests.programs import run

VERSION = "0.32.0"
SHA256 = "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad"
FETCH_WITHIN_S = 600.0


class FetchError(DynamoError):
    """The source distribution cannot be had."""


def fetch_tests(cache: Path) -> Path:
    """Folder of vLLM's tests, fetched at the first call."""
    folder = cache / f"vllm-{VERSION}-tests"
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetching-", dir=cache) as scratch:
            _unpacked_tests(Path(scratch)).rename(folder)
    return folder


def _unpacked_tests(scratch: Path) -> Path:
    """pip unpacks a source distribution only to build something from it. This build ends at once, as its requirements
    are not there (`--no-build-isolation`), and pip leaves what it has unpacked (`--no-clean`)."""
    wanted = scratch / "requirement.txt"
    wanted.write_text(f"vllm=={VERSION} --hash=sha256:{SHA256}\n")
    options = ["--no-deps", "--no-build-isolation", "--no-clean", "--no-binary=:all:", f"--dest={scratch}"]
    pip = run(
        [sys.executable, "-m", "pip", "download", *options, f"--requirement={wanted}"],
        FETCH_WITHIN_S,
        {"TMPDIR": str(scratch), "VLLM_TARGET_DEVICE": "empty"},
    )
    found = list(scratch.glob("pip-*/vllm_*/tests"))
    if len(found) != 1:
        raise FetchError(f"pip did not unpack vLLM {VERSION}", f"it said:\n{pip.last_lines}")
    return found[0]
