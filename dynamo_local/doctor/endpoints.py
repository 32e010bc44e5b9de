"""The registries of endpoints, and endpoints that have failed."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from dynamo_local.core.errors import StateError
from dynamo_local.doctor.files import OTHERS
from dynamo_local.doctor.finding import Finding, fail, ok, warn
from dynamo_local.doctor.namespaces import namespaces
from state.documents import decode
from state.endpoints.board import read_board
from state.endpoints.registry import REGISTRY, has_registry, read_registry
from state.namespaces import is_running
from state.paths import StatePaths


def check_endpoints(root: Path) -> Iterator[Finding]:
    """Findings for each namespace of the state folder that has a registry."""
    for paths in namespaces(root):
        if has_registry(paths):
            yield from _registry(paths)


def open_files(paths: StatePaths) -> list[Path]:
    """Files of a registry, of ours, that other users can read or write."""
    return [path for path in (paths.registry_file, paths.registry_copy) if path.exists() and _is_open(path)]


def _registry(paths: StatePaths) -> Iterator[Finding]:
    check, opened = f"endpoints {paths.namespace}", list(_opened(paths))
    try:
        number, damage = len(read_registry(paths).entries), _damage(paths)
    except StateError as error:
        yield fail(check, error.cause, error.remedy or "look at the permissions of the state folder")
        yield from opened
        return
    if damage is not None:
        yield warn(check, damage, "nothing: the next change of an endpoint, or start of the server, writes both")
    elif not opened:
        yield ok(check, f"{number} in the registry")
    yield from opened
    yield from _failed(paths)


def _opened(paths: StatePaths) -> Iterator[Finding]:
    if found := open_files(paths):
        names = " ".join(map(str, found))
        remedy = f"`dynamo doctor --fix`, or: chmod 600 {names}"
        yield warn(f"endpoints {paths.namespace}", f"other users can open {names}", remedy)


def _damage(paths: StatePaths) -> str | None:
    """Which of the two files of a registry is damaged or missing, with the reason."""
    for path in (paths.registry_file, paths.registry_copy):
        try:
            decode(REGISTRY, path.read_bytes())
        except OSError as error:
            return f"{path} cannot be read ({error.strerror}); the other one of its two files is whole"
        except StateError as error:
            return f"{path} is damaged ({error.cause}); the other one of its two files is whole"
    return None


def _failed(paths: StatePaths) -> Iterator[Finding]:
    """The endpoints of a running server that have failed."""
    board = read_board(paths) if is_running(paths) else None
    for view in () if board is None else board.endpoints:
        if view.status.state == "failed":
            name = view.spec.name
            yield warn(
                f"endpoint {name}",
                f"has failed: {view.status.reason}",
                f"`dynamo endpoint update {name} --namespace {paths.namespace}` changes it",
            )


def _is_open(path: Path) -> bool:
    found = path.stat()
    return found.st_uid == os.geteuid() and bool(stat.S_IMODE(found.st_mode) & OTHERS)
