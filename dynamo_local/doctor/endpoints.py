"""Facts about the registries of endpoints, and about endpoints that have failed."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from dynamo_local.core.doctor.endpoints import EndpointsFacts
from dynamo_local.core.errors import StateError
from dynamo_local.doctor.namespaces import namespaces
from state.documents import decode
from state.endpoints.board import read_board
from state.endpoints.registry import REGISTRY, has_registry, read_registry
from state.namespaces import is_running
from state.paths import StatePaths

_OTHERS = 0o077


def endpoints(root: Path) -> tuple[EndpointsFacts, ...]:
    """Facts about all namespaces of the state folder that have a registry."""
    return tuple(_facts(paths) for paths in namespaces(root) if has_registry(paths))


def _facts(paths: StatePaths) -> EndpointsFacts:
    files = [path for path in (paths.registry_file, paths.registry_copy) if path.exists()]
    open_files = tuple(str(path) for path in files if _is_open(path))
    try:
        number = len(read_registry(paths).entries)
    except StateError as error:
        return EndpointsFacts(
            paths.namespace,
            trouble=error.cause,
            remedy=error.remedy or "look at the permissions of the state folder",
            open_files=open_files,
        )
    return EndpointsFacts(paths.namespace, number, damaged=_damage(paths), open_files=open_files, failed=_failed(paths))


def _damage(paths: StatePaths) -> str | None:
    for path in (paths.registry_file, paths.registry_copy):
        try:
            decode(REGISTRY, path.read_bytes())
        except OSError as error:
            return f"{path} cannot be read ({error.strerror}); the other one of its two files is whole"
        except StateError as error:
            return f"{path} is damaged ({error.cause}); the other one of its two files is whole"
    return None


def _failed(paths: StatePaths) -> tuple[tuple[str, str], ...]:
    board = read_board(paths) if is_running(paths) else None
    views = () if board is None else board.endpoints
    return tuple((view.spec.name, view.status.reason) for view in views if view.status.state == "failed")


def _is_open(path: Path) -> bool:
    found = path.stat()
    return found.st_uid == os.geteuid() and bool(stat.S_IMODE(found.st_mode) & _OTHERS)
