"""All namespaces that a state folder has files of, also of locks, logs and endpoints alone."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from dynamo_local.core.errors import ConfigError
from state.paths import StatePaths

_SUFFIXES = (".json", ".json.lock", ".lock", ".run", ".logs", ".endpoints.json", ".endpoints.copy.json")


def namespaces(root: Path) -> list[StatePaths]:
    """The paths of the namespaces, sorted by name. Empty if the folder cannot be read."""
    names: set[str] = set()
    with suppress(OSError):
        for path in root.iterdir():
            name, dot, rest = path.name.partition(".")
            if f"{dot}{rest}" in _SUFFIXES:
                names.add(name)
    found: list[StatePaths] = []
    for name in sorted(names):
        with suppress(ConfigError):
            found.append(StatePaths(root, name))
    return found
