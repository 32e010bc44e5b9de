"""Finds the servers of a state root by their files. Imports nothing that costs time: each command may call it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dynamo_local.core.errors import ConfigError, NotRunningError, StateError
from dynamo_local.core.names import check_namespace
from state.files import system_errors
from state.locks import server_pid
from state.paths import StatePaths

_SUFFIXES = frozenset({"json", "lock", "run"})
_LOGS = "logs"
_KEYS = frozenset({"keys.json", "keys.copy.json"})
_USAGE = "usage"
_REGISTRY = frozenset({"endpoints.json", "endpoints.copy.json"})


@dataclass(frozen=True)
class Found:
    """Namespaces under one state root, sorted. `crashed`: no server runs, and one that was killed has left files."""

    running: tuple[str, ...]
    crashed: tuple[str, ...]


def find_servers(root: Path) -> Found:
    """Find the servers that run, and those that have crashed. Raises DiskError."""
    running: list[str] = []
    crashed: list[str] = []
    for namespace in sorted(set(_names(root, _SUFFIXES))):
        paths = StatePaths(root, namespace)
        if is_running(paths):
            running.append(namespace)
        elif paths.statefile.exists() or paths.run_dir.exists():
            crashed.append(namespace)
    return Found(tuple(running), tuple(crashed))


def is_running(paths: StatePaths) -> bool:
    """Whether a server runs in the namespace: it holds the lock, or, if the lock file was removed, still lives."""
    return server_pid(paths) is not None or _owner_lives(paths)


def with_logs(root: Path) -> tuple[str, ...]:
    """The namespaces that have logs, sorted. Raises DiskError."""
    return tuple(sorted(_names(root, frozenset({_LOGS}))))


def with_usage(root: Path) -> tuple[str, ...]:
    """The namespaces of which usage is kept, sorted. Raises DiskError."""
    return tuple(sorted(_names(root, frozenset({_USAGE}))))


def with_store(root: Path, what: str) -> tuple[str, ...]:
    """The namespaces that have a store of these, "batches" or "tasks", sorted. Raises DiskError."""
    return tuple(sorted(_names(root, frozenset({what}))))


def with_registry(root: Path) -> tuple[str, ...]:
    """The namespaces that have a registry of endpoints, sorted. Raises DiskError."""
    return tuple(sorted(set(_names(root, _REGISTRY))))


def with_keys(root: Path) -> tuple[str, ...]:
    """The namespaces that have a registry of keys, sorted. Raises DiskError."""
    return tuple(sorted(set(_names(root, _KEYS))))


def _names(root: Path, suffixes: frozenset[str]) -> Iterator[str]:
    with system_errors(f"cannot list {root}"):
        try:
            entries = [path.name for path in root.iterdir()]
        except FileNotFoundError:
            return
    for entry in entries:
        # A namespace has no dot. Other files, such as {namespace}.json.tmp, have two.
        namespace, _, suffix = entry.partition(".")
        if suffix in suffixes:
            with suppress(ConfigError):
                yield check_namespace(namespace)


def _owner_lives(paths: StatePaths) -> bool:
    if not paths.statefile.exists():
        return False
    # Imported late: the statefile's model costs time, and is seldom needed here.
    from state.machine.processes import alive
    from state.statefile.store import StateStore

    try:
        owner = StateStore(paths).read_file().owner
    except (NotRunningError, StateError):
        return False
    return alive(owner.pid, owner.start_time)
