"""The registry of keys: which there are, and by which secrets they are known. Pure; `state.keys` keeps it on disk.

create    (no key)   -> a key with a number, a slot and a secret
rotate    key        -> the same key with another secret; the former one holds until the overlap is over
revoke    key        -> (no key)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NoReturn

import msgspec

from dynamo_local.core.documents import Convert, NewerDocumentError, as_document, from_versions
from dynamo_local.core.endpoints.values import shown
from dynamo_local.core.errors import ConfigError, KeyAbsentError, KeyConflictError, StateError
from dynamo_local.core.keys.values import ApiKey, FormerSecret, KeyTerms
from dynamo_local.core.names import check_endpoint, endpoint_name_like
from dynamo_local.core.priority.classes import MOST_PRIORITY
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


# Keys as they are ordered: commands and REST give mappings, which become terms or an error. Pure.

RESERVED = frozenset({"api-key-file", "admin-key-file"})
"""Names of those who bring a key of these files."""

MOST_NUMBER = 1_000_000_000
MOST_AT_ONCE = 65_535
MOST_ENDPOINTS = 1000
DEFAULT_OVERLAP_S = 3600.0
"""How long the former secret stays valid after a rotation if nothing else is said."""
MOST_OVERLAP_S = 366 * 86_400.0
LATEST = 253_402_300_799.0
"""The end of the year 9999, in seconds since 1970."""

EXPIRES_IN_S = "expires_in_s"
"""Beside the fields of a key: in how many seconds it expires."""

FIELDS: tuple[str, ...] = (*KeyTerms.__struct_fields__, EXPIRES_IN_S)


def check_key(name: Any) -> str:
    """Return the key's name, or raise ConfigError. Small letters, digits and inner hyphens, at most 40."""
    rule = "use small letters, digits and inner hyphens, at most 40 characters"
    if not isinstance(name, str):
        raise ConfigError(f"the name of a key is {shown(name)}", rule)
    if name in RESERVED:
        raise ConfigError(f"{name} is the name of the keys in that file", "choose another name")
    try:
        return check_endpoint(name)
    except ConfigError:
        like = endpoint_name_like(name)
        raise ConfigError(f"{shown(name)} is no name for a key", f"{rule}, such as {like}" if like else rule) from None


def read_terms(fields: object, now: float) -> KeyTerms:
    """The terms of the fields as they came; one that is None gets its default. `now`: of the wall clock.

    Raises ConfigError, whose cause names key and field.
    """
    if not isinstance(fields, Mapping):
        raise ConfigError(f"a key is {shown(fields)}", "write its fields as a mapping: {name: ..., admin: true}")
    for field in fields:
        if field not in FIELDS:
            raise ConfigError(f"a key has no field {shown(field)}", suggest(str(field)[:60], FIELDS, "it has"))
    given = {field: value for field, value in fields.items() if value is not None}
    if "name" not in given:
        raise ConfigError("the key has no name", "write name: alice")
    name = check_key(given.pop("name"))
    checked = {field: _CHECKS[field](f"key {name}: {field}", value) for field, value in given.items()}
    terms = KeyTerms(name=name, **_with_end(name, checked, now))
    best, default = terms.best_priority, terms.default_priority
    if best is not None and default is not None and default < best:
        raise ConfigError(
            f"key {name}: default_priority {default} is better than best_priority {best}",
            "lower numbers are served first: write a default that is not below the best",
        )
    return terms


def _with_end(name: str, checked: dict[str, Any], now: float) -> dict[str, Any]:
    if EXPIRES_IN_S in checked:
        if "expires_at" in checked:
            raise ConfigError(f"key {name}: expires_at and expires_in_s are both given", "leave one out")
        checked["expires_at"] = min(now + checked.pop(EXPIRES_IN_S), LATEST)
    if checked.get("expires_at", math.inf) <= now:
        raise ConfigError(f"key {name}: expires_at is over already", "write a later time, in seconds since 1970")
    return checked


def check_overlap(overlap_s: Any) -> float:
    """Return how long the former secret of a key stays valid, in seconds, or raise ConfigError."""
    if not _is_number(overlap_s) or not 0 <= overlap_s <= MOST_OVERLAP_S:
        raise ConfigError(f"overlap_s is {shown(overlap_s)}", f"write seconds from 0 to {MOST_OVERLAP_S:.0f}")
    return float(overlap_s)


def _whole(least: int, most: int) -> Callable[[str, Any], int]:
    def check(what: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            _refuse(what, value, f"write a whole number from {least} to {most}")
        return value

    return check


def _time(what: str, value: Any) -> float:
    if not _is_number(value) or not 0 < value <= LATEST:
        _refuse(what, value, "write seconds")
    return float(value)


def _flag(what: str, value: Any) -> bool:
    if not isinstance(value, bool):
        _refuse(what, value, "write true or false")
    return value


def _endpoints(what: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or len(value) > MOST_ENDPOINTS:
        _refuse(what, value, f"write a list of at most {MOST_ENDPOINTS} names")
    for name in value:
        if not isinstance(name, str):
            _refuse(what, value, "write the names of endpoints")
        check_endpoint(name)
    return tuple(dict.fromkeys(value))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _refuse(what: str, value: Any, remedy: str) -> NoReturn:
    raise ConfigError(f"{what} is {shown(value)}", remedy)


_CHECKS: Mapping[str, Callable[[str, Any], Any]] = MappingProxyType(
    {
        "endpoints": _endpoints,
        "requests_per_minute": _whole(1, MOST_NUMBER),
        "tokens_per_minute": _whole(1, MOST_NUMBER),
        "requests_at_once": _whole(1, MOST_AT_ONCE),
        "best_priority": _whole(-MOST_PRIORITY, MOST_PRIORITY),
        "default_priority": _whole(-MOST_PRIORITY, MOST_PRIORITY),
        "expires_at": _time,
        EXPIRES_IN_S: _time,
        "admin": _flag,
    }
)
