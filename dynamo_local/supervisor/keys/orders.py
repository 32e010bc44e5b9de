"""Carries out orders about API keys. Frontends read the registry from its file for themselves (state/keys.py)."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from dynamo_local.control.operations import (
    CREATE_KEY,
    GET_KEY,
    LIST_KEYS,
    REVOKE_KEY,
    ROTATE_KEY,
    Call,
    Handlers,
)
from dynamo_local.core.keys.registry import (
    DEFAULT_OVERLAP_S,
    KeyRegistry,
    check_key,
    check_overlap,
    create_key,
    read_terms,
    revoke_key,
    rotate_key,
)
from dynamo_local.core.keys.values import PREFIX, SECRET_BYTES, ApiKey, digest_of, view_of
from dynamo_local.core.messages.reports import Event
from dynamo_local.supervisor.endpoints.kept_registry import KeptDocument


def new_secret() -> str:
    """A secret that nobody can guess."""
    return PREFIX + secrets.token_urlsafe(SECRET_BYTES)


@dataclass(frozen=True)
class KeyOrders:
    """Carries out orders, one at a time. One that cannot be carried out raises UsageError, and has changed nothing.
    `record` notes an event; `changed` is called before an order is answered."""

    kept: KeptDocument[KeyRegistry]
    record: Callable[[Event], None]
    changed: Callable[[], None] = lambda: None
    wall_clock: Callable[[], float] = time.time
    make_secret: Callable[[], str] = new_secret

    @property
    def handlers(self) -> Handlers:
        return {
            LIST_KEYS: self.list,
            GET_KEY: self.get,
            CREATE_KEY: self.create,
            ROTATE_KEY: self.rotate,
            REVOKE_KEY: self.revoke,
        }

    async def list(self, _: Call) -> dict[str, Any]:
        return {"object": "list", "data": [self._shown(key) for key in self.kept.current.keys.values()]}

    async def get(self, call: Call) -> dict[str, Any]:
        return self._shown(self.kept.current.key(call.name(check_key)))

    async def create(self, call: Call) -> dict[str, Any]:
        fields, now, secret = call.fields(), self.wall_clock(), self.make_secret()
        terms = read_terms(fields, now)
        after = await self._change(lambda registry: create_key(registry, terms, _digest(secret), now))
        self._record(f"key {terms.name} created{', of an administrator' if terms.admin else ''}", call)
        return {**self._shown(after.key(terms.name)), "secret": secret}

    async def rotate(self, call: Call) -> dict[str, Any]:
        name, now, secret = call.name(check_key), self.wall_clock(), self.make_secret()
        given = call.fields(("overlap_s",)).get("overlap_s")
        overlap_s = DEFAULT_OVERLAP_S if given is None else check_overlap(given)
        after = await self._change(lambda registry: rotate_key(registry, name, _digest(secret), overlap_s, now))
        self._record(f"key {name} rotated", call)
        return {**self._shown(after.key(name)), "secret": secret}

    async def revoke(self, call: Call) -> dict[str, Any]:
        name, opens = call.name(check_key), call.switch("open")
        after = await self._change(lambda registry: revoke_key(registry, name, opens=opens))
        opened = "" if after.keys else "; no key is left, the server answers everybody"
        self._record(f"key {name} revoked{opened}", call)
        return {"object": "key", "name": name, "deleted": True}

    async def _change(self, change: Callable[[KeyRegistry], KeyRegistry]) -> KeyRegistry:
        after = await self.kept.change(change)
        # Before it is answered: a key that is said to be revoked is known to no frontend any more.
        self.changed()
        return after

    def _record(self, what: str, call: Call) -> None:
        why = f"by key {call.by}" if call.by else "by the owner of the server"
        self.record(Event("key", what, why, key=call.by))

    def _shown(self, key: ApiKey) -> dict[str, Any]:
        return {"object": "key", **msgspec.structs.asdict(view_of(key, self.wall_clock()))}


def _digest(secret: str) -> str:
    return digest_of(secret.encode())
