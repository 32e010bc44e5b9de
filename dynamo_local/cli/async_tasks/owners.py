"""Who owns the tasks of a key."""

from __future__ import annotations

from dynamo_local.core.errors import KeyAbsentError
from state.keys import read_key_registry
from state.paths import StatePaths

_OF_FILES = ("api-key-file", "admin-key-file")
"""Names of those who bring a key of a file: all of one are one owner."""


def owner_of(key: str | None, paths: StatePaths) -> str:
    """Return the owner of what is stored for a key by its name; None: where no key is needed. Raises KeyAbsentError,
    StateError."""
    if key is None:
        return ""
    if key in _OF_FILES:
        return key
    found = next((each for each in read_key_registry(paths).keys.values() if each.name == key), None)
    if found is None:
        raise KeyAbsentError(f"there is no key {key[:60]!r}", "see `dynamo key list`")
    return f"{found.name}#{found.number}"
