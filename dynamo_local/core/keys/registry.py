"""The registry of keys: which there are, and by which secrets they are known. Pure; `state.keys` keeps it on disk.

create    (no key)   -> a key with a number, a slot and a secret
rotate    key        -> the same key with another secret; the former one holds until the overlap is over
revoke    key        -> (no key)
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from dynamo_local.core.documents import Convert, NewerDocumentError, as_document, from_versions
from dynamo_local.core.endpoints.values import shown
from dynamo_local.core.errors import KeyAbsentError, KeyConflictError, StateError
from dynamo_local.core.keys.values import ApiKey, FormerSecret, KeyTerms
from dynamo_local.core.suggestions import suggest

KEYS_VERSION = 1

MOST_KEYS = 1000
"""Slots among the counters of limits."""

KEY_CONVERSIONS: Mapping[int, Convert] = MappingProxyType({})
"""By version, what makes the next one of it."""


class KeyRegistry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All keys by name, in the order of their creation. Change it by the functions below.

    `next_number`: the number of the next key.
    """

    keys: dict[str, ApiKey] = {}
    next_number: int = 1

    def __post_init__(self) -> None:
        keys = list(self.keys.values())
        numbers, slots = [key.number for key in keys], [key.slot for key in keys]
        digests = [digest for key in keys for digest in _digests(key)]
        if [key.name for key in keys] != list(self.keys):
            raise StateError("a key has another name than its entry")
        if sorted(set(numbers)) != numbers or any(not 1 <= number < self.next_number for number in numbers):
            raise StateError("the keys are not in the order of their creation")
        if len(set(slots)) < len(slots) or any(not 0 <= slot < MOST_KEYS for slot in slots):
            raise StateError("two keys have the same slot, or one has none")
        if len(set(digests)) < len(digests):
            raise StateError("two keys have the same secret")

    def key(self, name: str) -> ApiKey:
        """The key of that name. Raises KeyAbsentError, which names similar ones."""
        if name not in self.keys:
            known = suggest(name[:60], self.keys, "there are:")
            raise KeyAbsentError(f"there is no key {shown(name)}", known)
        return self.keys[name]


def create_key(registry: KeyRegistry, terms: KeyTerms, digest: str, now: float) -> KeyRegistry:
    """Add a key, known by the secret of that digest. Raises KeyConflictError for a name that is taken."""
    if terms.name in registry.keys:
        raise KeyConflictError(
            f"there is a key {terms.name} already",
            f"another secret for it: dynamo key rotate {terms.name}; other terms: revoke it first",
        )
    if len(registry.keys) >= MOST_KEYS:
        raise KeyConflictError(f"there are {MOST_KEYS} keys already", "revoke some")
    taken = {key.slot for key in registry.keys.values()}
    slot = next(slot for slot in range(MOST_KEYS) if slot not in taken)
    number = registry.next_number
    key = ApiKey(digest=digest, number=number, slot=slot, created_at=now, **msgspec.structs.asdict(terms))
    return KeyRegistry({**registry.keys, key.name: key}, number + 1)


def rotate_key(registry: KeyRegistry, name: str, digest: str, overlap_s: float, now: float) -> KeyRegistry:
    """Give a key the secret of that digest. The one that it has holds for `overlap_s` more; an earlier one does not.

    Raises KeyAbsentError.
    """
    key = registry.key(name)
    former = FormerSecret(key.digest, now + overlap_s) if overlap_s > 0 else None
    rotated = msgspec.structs.replace(key, digest=digest, former=former)
    return KeyRegistry({**registry.keys, name: rotated}, registry.next_number)


def revoke_key(registry: KeyRegistry, name: str, *, opens: bool = False) -> KeyRegistry:
    """Remove a key. Raises KeyAbsentError; KeyConflictError if it is the last one, unless `opens`: without keys the
    server answers everybody."""
    registry.key(name)
    if len(registry.keys) == 1 and not opens:
        raise KeyConflictError(
            f"{name} is the last key: without keys the server answers everybody",
            f"create another first, or end this secret by `dynamo key rotate {name}`, or open the server by --open",
        )
    return KeyRegistry({key: each for key, each in registry.keys.items() if key != name}, registry.next_number)


def keys_to_document(registry: KeyRegistry) -> dict[str, Any]:
    """The registry as JSON has it, with its version."""
    return as_document(registry, KEYS_VERSION)


def keys_from_document(document: Any, conversions: Mapping[int, Convert] = KEY_CONVERSIONS) -> tuple[KeyRegistry, int]:
    """Inverse of `keys_to_document`, also for older versions. Returns the registry and the version that it had.

    Raises StateError for anything else, and NewerDocumentError for what a later release has written.
    """
    return from_versions(document, KeyRegistry, KEYS_VERSION, conversions, _too_new)


def _too_new(version: int) -> NewerDocumentError:
    return NewerDocumentError(
        f"the registry of keys has version {version}, and this release reads {KEYS_VERSION} at most",
        "use the release that wrote it, or put a backup in its place",
    )


def _digests(key: ApiKey) -> tuple[str, ...]:
    return (key.digest,) if key.former is None else (key.digest, key.former.digest)
