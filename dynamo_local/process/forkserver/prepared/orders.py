"""Orders for prepared processes: a file for each configuration of workers, in a folder of the run directory.

The files are the truth: the fork server makes what they say, also one that was started again, and ends what they say no
more. A worker whose engine has started writes that of its own configuration; the server removes those of a revision
that is gone, and all of them with the run directory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from dynamo_local.core.errors import ConfigError
from dynamo_local.core.names import Watcher, parse_watcher
from state.files import system_errors
from state.paths import StatePaths

_ORDER = ".order"


class PreparedOrder(msgspec.Struct, frozen=True):
    """The order to prepare a process.

    `key`: all that its weights depend on. `module`: has `prepare(recipe)`, which loads them. `weight_bytes`: their size
    in memory. `keep_free_bytes`: memory that must be left once they are loaded.
    """

    key: str
    module: str
    recipe: bytes
    weight_bytes: int
    keep_free_bytes: int


class Found(msgspec.Struct, frozen=True):
    """An order as its file has it. `number`: differs each time that the order is written."""

    order: PreparedOrder
    number: int


def write_order(paths: StatePaths, watcher: Watcher, order: PreparedOrder) -> None:
    """Order a process for workers that are configured as this one. Without a fork server nothing happens. Raises
    DiskError."""
    if not paths.prepared_dir.is_dir():
        return
    path = paths.prepared_dir / f"{watcher.first}{_ORDER}"
    # Workers that are configured alike may start at the same time.
    temporary = path.with_suffix(f".{os.getpid()}")
    with system_errors(f"cannot write {path}"):
        temporary.touch(0o600)
        temporary.write_bytes(msgspec.msgpack.encode(Found(order, time.monotonic_ns())))
        temporary.rename(path)


def withdraw(paths: StatePaths, revision: str) -> None:
    """Withdraw the orders for all workers of an endpoint's revision. Harmless if there are none. Raises DiskError."""
    with system_errors(f"cannot remove orders from {paths.prepared_dir}"):
        for watcher, path in _listed(paths):
            if watcher.revision == revision:
                path.unlink(missing_ok=True)


def read_orders(paths: StatePaths) -> Mapping[Watcher, Found]:
    """All orders. What cannot be read is no order; nor is anything once the folder is gone."""
    found: dict[Watcher, Found] = {}
    for watcher, path in _listed(paths):
        try:
            found[watcher] = msgspec.msgpack.decode(path.read_bytes(), type=Found)
        except (OSError, msgspec.DecodeError) as error:
            print(f"warning: {path} is no order for a prepared process: {error}", flush=True)
    return found


def link_sockets(paths: StatePaths, keys: Mapping[Watcher, str]) -> None:
    """Have the workers of these configurations find the processes with these keys, and others none."""
    links = {paths.prepared_socket(str(watcher)): paths.prepared_socket(key).name for watcher, key in keys.items()}
    for path in paths.prepared_dir.glob("*.sock"):
        if path.is_symlink() and links.get(path) != str(path.readlink()):
            path.unlink()
    for path, target in links.items():
        with suppress(FileExistsError):
            path.symlink_to(target)


def _listed(paths: StatePaths) -> Iterator[tuple[Watcher, Path]]:
    for path in sorted(paths.prepared_dir.glob(f"*{_ORDER}")):
        with suppress(ConfigError):
            yield parse_watcher(path.stem), path
