"""The caller of a request: found once for each request, by the key that it brings.

The gate notes the caller in the request's context, where everything behind it finds it.
"""

from __future__ import annotations

import hashlib
import math
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from components.frontend.keys.known import KnownKeys
from dynamo_local.core.http.asgi import HeaderMap
from dynamo_local.core.http.bounds.admission import UNLIMITED, WITHOUT_KEY, PriorityTerms, Refusal, terms_of
from dynamo_local.core.http.paths import Route
from dynamo_local.core.keys.values import ApiKey, digest_of, has_number

API_KEY_FILE = "api-key-file"
"""Name of those who bring a key of that file."""

ADMIN_KEY_FILE = "admin-key-file"

CLOSED_RETRY_S = 5

_MARK_BYTES = 16


@dataclass(frozen=True)
class Caller:
    """The caller of a request.

    `name`: None where no key is needed. `key`: None for keys of files, which have no limits. `admin`: may change
    endpoints and keys. `generates`: may ask models. `priorities`: those that it may ask for.
    """

    name: str | None = None
    key: ApiKey | None = None
    admin: bool = False
    generates: bool = True
    priorities: PriorityTerms = UNLIMITED

    @property
    def owner(self) -> str:
        """Owner of what is stored for the caller. A key of the registry is another owner than a later key of its name;
        the keys of a file are one owner, and so are all who need no key."""
        return (self.name or "") if self.key is None else self.key.owner

    def allows(self, endpoint: str) -> bool:
        """Whether requests may be for that endpoint, or the graph's own model of that name."""
        return self.key is None or self.key.allows(endpoint)


ANYBODY = Caller(priorities=WITHOUT_KEY)
"""Whoever brings no key that is known."""


class Callers:
    """Finds who asks, by the digest of the key that a request brings.

    Secrets are random, so how long a look for a digest takes tells nothing of them: nobody can choose a guess whose
    digest begins like another. Right keys are remembered by a mark, which is a digest with a key of this process: it is
    computed faster than that by which keys are stored, and tells as little of them.
    """

    def __init__(
        self,
        api_keys: Iterable[str] = (),
        admin_keys: Iterable[str] = (),
        known: KnownKeys | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`api_keys`, `admin_keys`: as in `take`. `known`: keys of the registry."""
        self._known = known
        self._wall_clock = wall_clock
        self._seen = 0 if known is None else known.version
        self._marking = hashlib.blake2s(key=secrets.token_bytes(_MARK_BYTES), digest_size=_MARK_BYTES)
        self._remembered: dict[bytes, tuple[Caller, float]] = {}
        """By the mark of a right key, who brings it, and until when it is right if nothing changes."""
        self.take(api_keys, admin_keys)

    def take(self, api_keys: Iterable[str], admin_keys: Iterable[str]) -> None:
        """Know these keys from now on: those of the two files that settings name."""
        plain = {digest_of(key.encode()) for key in api_keys}
        admins = {digest_of(key.encode()) for key in admin_keys}
        self._has_plain, self._has_admins = bool(plain), bool(admins)
        self._of_files = {digest: Caller(API_KEY_FILE) for digest in plain} | {
            digest: Caller(ADMIN_KEY_FILE, admin=True, generates=digest in plain) for digest in admins
        }
        self._remembered.clear()

    @property
    def needs_key(self) -> bool:
        """Whether requests need a key."""
        return self._has_plain or (self._known is not None and self._known.needs_key)

    @property
    def has_admins(self) -> bool:
        """Whether a key opens the paths of administrators."""
        return self._has_admins or (self._known is not None and self._known.has_admins)

    def find(self, headers: HeaderMap) -> Caller | Refusal:
        """Find who asks: anybody, if no key is given or none that is known. A refusal: who it is cannot be known, or
        their key has expired."""
        known = self._known
        if known is not None:
            known.look()
            if known.why_closed:
                return Refusal(503, known.why_closed, "ServiceUnavailableError", retry_after_s=CLOSED_RETRY_S)
            if known.version != self._seen:
                self._seen = known.version
                self._remembered.clear()
        given = _key_given(headers)
        # Clients send some key also where none is asked for.
        if not given or not (self._of_files or (known is not None and known.needs_key)):
            return ANYBODY
        marking = self._marking.copy()
        marking.update(given)
        mark = marking.digest()
        found = self._remembered.get(mark)
        if found is not None and self._wall_clock() < found[1]:
            return found[0]
        return self._find(digest_of(given), mark)

    def of_owner(self, owner: str) -> Caller | None:
        """Return the caller whose owner that is, with any priority. None: their key is gone, or has expired."""
        if not has_number(owner):
            return Caller(owner or None)
        if self._known is None:
            return None
        self._known.look()
        now = self._wall_clock()
        key = self._known.of_owner(owner)
        return None if key is None or now >= key.valid_until(key.digest) else Caller(key.name, key)

    def _find(self, digest: str, mark: bytes) -> Caller | Refusal:
        """Find who has the secret of this digest, and remember them by its mark."""
        now, until = self._wall_clock(), math.inf
        caller = self._of_files.get(digest)
        if caller is None:
            key = None if self._known is None else self._known.find(digest, now)
            if key is None:
                return ANYBODY
            # Only who has the secret comes so far.
            until = key.valid_until(digest)
            if now >= until:
                return Refusal(401, f"key {key.name} has expired", "AuthenticationError")
            caller = Caller(key.name, key, admin=key.admin, priorities=terms_of(key))
        self._remembered[mark] = caller, until
        return caller

    def refusal_of(self, caller: Caller, path: str, route: Route, service: str) -> Refusal | None:
        """Return the answer to a caller who may not ask for this path. `service`: as errors name it."""
        if route.admin:
            return self._no_admin(caller, path, service)
        if route.keyless or not self.needs_key or (caller.name is not None and caller.generates):
            return None
        return Refusal(401, "missing or wrong API key", "AuthenticationError")

    def _no_admin(self, caller: Caller, path: str, service: str) -> Refusal | None:
        if not self.has_admins:
            why = (
                f"{path} is closed: set admin-key-file of {service} to open it to administrators, or "
                "create a key of an administrator (dynamo key create NAME --admin)"
            )
            return Refusal(403, why, "PermissionDeniedError")
        if caller.admin:
            return None
        if caller.name is not None:
            return Refusal(403, "this needs the key of an administrator", "PermissionDeniedError")
        return Refusal(401, "missing or wrong key of an administrator", "AuthenticationError")


def _key_given(headers: HeaderMap) -> bytes:
    """Return the key as OpenAI's clients send it (Authorization: Bearer) or as Anthropic's do (x-api-key)."""
    given = headers.get(b"authorization", b"")
    if given.startswith(b"Bearer "):
        return given[7:]
    scheme, _, key = given.partition(b" ")
    return key if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
