"""All namespaces that a state folder has files of, also of locks, or of what is kept, alone."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from dynamo_local.core.errors import ConfigError
from state.paths import KEPT, StatePaths

_OURS = frozenset({"json", "lock", "run", *KEPT})


def namespaces(root: Path) -> list[StatePaths]:
    """The paths of the namespaces, sorted by name. Empty if the folder cannot be read."""
    names: set[str] = set()
    with suppress(OSError):
        for path in root.iterdir():
            name, _, rest = path.name.partition(".")
            if rest.partition(".")[0] in _OURS:
                names.add(name)
    found: list[StatePaths] = []
    for name in sorted(names):
        with suppress(ConfigError):
            found.append(StatePaths(root, name))
    return found
