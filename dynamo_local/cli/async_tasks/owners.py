"""Finds the owner of the tasks of a key, by the key's name."""

from __future__ import annotations

from dynamo_local.core.errors import KeyAbsentError
from dynamo_local.core.keys.checks import RESERVED
from state.keys import read_key_registry
from state.paths import StatePaths


def owner_of(key: str | None, paths: StatePaths) -> str:
    """Return the owner of what is stored for a key by its name; None: where no key is needed. Raises KeyAbsentError,
    StateError."""
    if key is None:
        return ""
    if key in RESERVED:
        return key
    found = next((each for each in read_key_registry(paths).keys.values() if each.name == key), None)
    if found is None:
        raise KeyAbsentError(f"there is no key {key[:60]!r}", "see `dynamo key list`")
    return found.owner
