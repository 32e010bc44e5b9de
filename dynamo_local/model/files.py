"""Identity of the files in a model's folder, as far as the outside tells: names, sizes and times.

One machine, one clock, one file system: files that look the same from outside are taken for the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dynamo_local.core.errors import ConfigError

MODEL_FILES_ENV = "DYN_MODEL_FILES"
"""Set by the server in a worker of an endpoint: identity of the files that its revision was checked with."""

_READERS = 4


def files_identity(folder: Path | None, *, strictly: bool = False) -> str:
    """Names, sizes and times of the files there. (In a Hugging Face cache they are links to files named by content.)

    `strictly`: with the times at which they were changed here, which no copy takes along: a folder that has been filled
    anew is another one. Raises OSError.
    """
    if folder is None:
        return "unknown"
    found: list[Any] = []
    for path in sorted(folder.iterdir()):
        target = path.resolve()
        if target.is_file():
            status = target.stat()
            changed = (status.st_ino, status.st_ctime_ns) if strictly else ()
            found.append((path.name, target.name, status.st_size, status.st_mtime_ns, *changed))
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


def contents_identity(folder: Path) -> str:
    """Names and contents of the files there: the same on every machine. Reads all of them. Raises OSError."""
    files = [path for path in sorted(folder.iterdir()) if path.is_file()]
    with ThreadPoolExecutor(_READERS) as readers:
        digests = list(readers.map(_digest, files))
    return hashlib.sha256(
        json.dumps([(path.name, digest) for path, digest in zip(files, digests, strict=True)]).encode()
    ).hexdigest()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_identity(folder: str) -> str:
    """As `files_identity`. Raises ConfigError for a folder that cannot be read."""
    try:
        return files_identity(Path(folder))
    except OSError as error:
        raise ConfigError(
            f"the model's folder {folder} cannot be read: {error.strerror}", "put its files back, or name another model"
        ) from error


def check_model_files(config: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Raise ConfigError in a worker whose model's files are others than when its endpoint's revision was checked: other
    workers may have loaded the former ones."""
    wanted, folder = environ.get(MODEL_FILES_ENV), config.get("model")
    if wanted is None or not isinstance(folder, str):
        return
    if read_identity(folder) != wanted:
        raise ConfigError(
            f"the model's files in {folder} are others than when its endpoint was updated last",
            "the server makes another revision of the endpoint, with which all workers load the same files",
        )
