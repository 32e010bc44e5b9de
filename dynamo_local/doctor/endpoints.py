"""The registries of endpoints, and endpoints that have failed."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from dynamo_local.control.answers import Finding, fail, ok, warn
from dynamo_local.core.errors import StateError
from dynamo_local.doctor.files import OTHERS
from dynamo_local.doctor.namespaces import namespaces
from dynamo_local.supervisor.diagnosis import failed_endpoints
from state.documents import decode
from state.endpoints.registry import REGISTRY, has_registry, read_registry
from state.paths import StatePaths


def check_endpoints(root: Path, told: Mapping[str, Sequence[Finding]]) -> Iterator[Finding]:
    """Findings for each namespace of the state folder that has a registry. `told`: see `told_by_servers`."""
    for paths in namespaces(root):
        if has_registry(paths):
            yield from _registry(paths, told)


def open_files(paths: StatePaths) -> list[Path]:
    """Files of a registry, of ours, that other users can read or write."""
    return [path for path in (paths.registry_file, paths.registry_copy) if path.exists() and _is_open(path)]


def _registry(paths: StatePaths, told: Mapping[str, Sequence[Finding]]) -> Iterator[Finding]:
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
    yield from told[paths.namespace][1:] if paths.namespace in told else failed_endpoints(paths)


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


def _is_open(path: Path) -> bool:
    found = path.stat()
    return found.st_uid == os.geteuid() and bool(stat.S_IMODE(found.st_mode) & OTHERS)
