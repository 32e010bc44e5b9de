"""Carries out orders about API keys. Frontends read the registry from its file for themselves (state/keys.py)."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from dynamo_local.core.endpoints.refusals import refusal_of
from dynamo_local.core.errors import DynamoError
from dynamo_local.core.keys.orders import changed, name_in, told, view_of
from dynamo_local.core.keys.registry import KeyRegistry
from dynamo_local.core.keys.values import PREFIX, SECRET_BYTES
from dynamo_local.core.messages.events import Event
from dynamo_local.core.messages.keys import CreateKey, KeyOrder, KeysAnswer, ListKeys, RevokeKey, RotateKey
from dynamo_local.supervisor.endpoints.kept_registry import KeptDocument


def new_secret() -> str:
    """A secret that nobody can guess."""
    return PREFIX + secrets.token_urlsafe(SECRET_BYTES)


@dataclass(frozen=True)
class KeyOrders:
    """Carries out orders, one at a time. `record` notes an event."""

    kept: KeptDocument[KeyRegistry]
    record: Callable[[Event], None]
    wall_clock: Callable[[], float] = time.time
    make_secret: Callable[[], str] = new_secret

    async def answer(self, order: KeyOrder) -> KeysAnswer:
        """Carry out an order. One that cannot be is refused, and has changed nothing."""
        try:
            return self._list(order.name) if isinstance(order, ListKeys) else await self._change(order)
        except DynamoError as error:
            return KeysAnswer(refused=refusal_of(error))

    def _list(self, name: str | None) -> KeysAnswer:
        registry, now = self.kept.current, self.wall_clock()
        keys = registry.keys.values() if name is None else (registry.key(name),)
        return KeysAnswer(tuple(view_of(key, now) for key in keys))

    async def _change(self, order: CreateKey | RotateKey | RevokeKey) -> KeysAnswer:
        secret, now = self.make_secret(), self.wall_clock()
        name = name_in(order, now)
        after = await self.kept.change(lambda registry: changed(registry, order, secret, now))
        why = f"by key {order.by}" if order.by else "by the owner of the server"
        self.record(Event("key", told(order, after, name), why, key=order.by))
        if isinstance(order, RevokeKey):
            return KeysAnswer()
        return KeysAnswer((view_of(after.key(name), now),), secret)
