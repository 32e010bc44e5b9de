"""An API key: who it is, what it allows, and how it is recognised. Pure.

A secret has 256 random bits, so a plain SHA-256 of it is as hard to turn back as the secret is to guess: a hash that is
slow on purpose protects words that people choose, and would only make each request slower.
"""

from __future__ import annotations

import hashlib
import math

import msgspec

PREFIX = "dyn-"
"""What a secret begins with, so that people and scanners of repositories know it for one."""

SECRET_BYTES = 32

_NUMBERED = "#"
"""Between a key's name and its number in the name of an owner; no name of a key has it."""


def digest_of(secret: bytes) -> str:
    """What is stored of a secret: its SHA-256, in hexadecimal digits."""
    return hashlib.sha256(secret).hexdigest()


def has_number(owner: str) -> bool:
    """Whether the owner is a key of the registry; others are all who bring a key of one file, and all without keys."""
    return _NUMBERED in owner


def name_in(owner: str) -> str:
    """Return the name of the owner's key; empty: nobody needs one."""
    return owner.partition(_NUMBERED)[0]


class FormerSecret(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The secret that a key had before its last rotation, valid until then, in seconds since 1970."""

    digest: str
    valid_until: float


class KeyTerms(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What a key allows. Times are of the wall clock, in seconds since 1970.

    `endpoints`: those that it may use; none: all. `requests_per_minute`, `tokens_per_minute`, `requests_at_once`:
    limits on all frontends together; None: no limit. `best_priority`: the lowest number that its requests may have as
    `priority`, where lower numbers are served first; None: any. `default_priority`: of requests that name none;
    None: 0, or the best if that is above 0. `admin`: it may change endpoints and keys.
    """

    name: str
    endpoints: tuple[str, ...] = ()
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    requests_at_once: int | None = None
    best_priority: int | None = None
    default_priority: int | None = None
    expires_at: float | None = None
    admin: bool = False


class ApiKey(KeyTerms, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A key as it is stored.

    `digest`: of its secret. `number` grows with each key that is created; `slot` is the key's place among the counters
    of limits, which a later key may get.
    """

    digest: str
    number: int
    slot: int
    created_at: float
    former: FormerSecret | None = None

    @property
    def owner(self) -> str:
        """Owner of what is stored for the key: another one than that of a later key of its name."""
        return f"{self.name}{_NUMBERED}{self.number}"

    def valid_until(self, digest: str) -> float:
        """Until when the secret of that digest opens, if nothing changes; 0: it does not. Infinite: there is no end."""
        end = math.inf if self.expires_at is None else self.expires_at
        if digest == self.digest:
            return end
        return min(end, self.former.valid_until) if self.former is not None and digest == self.former.digest else 0.0

    def allows(self, endpoint: str) -> bool:
        """Whether its requests may be for that endpoint; the empty name is the graph's own model."""
        return not self.endpoints or endpoint in self.endpoints

    def digests(self, now: float) -> tuple[str, ...]:
        """Digests of the secrets by which the key is known now."""
        if self.former is None or now >= self.former.valid_until:
            return (self.digest,)
        return self.digest, self.former.digest


class KeyView(KeyTerms, frozen=True, omit_defaults=True, kw_only=True):
    """A key as commands and REST show it.

    `former_until`: until when the secret before the last rotation is valid; None: it is not.
    """

    created_at: float
    former_until: float | None = None


def view_of(key: ApiKey, now: float) -> KeyView:
    """The key as it is shown."""
    former = key.former
    return KeyView(
        **{field: getattr(key, field) for field in KeyTerms.__struct_fields__},
        created_at=key.created_at,
        former_until=None if former is None or now >= former.valid_until else former.valid_until,
    )
