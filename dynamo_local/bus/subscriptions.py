"""Messages that subscriptions bring, and the answers to requests. Subscriptions are made by `Bus` (nats.py)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import UnionType
from typing import Protocol, TypeVar

from dynamo_local.bus import without_websockets  # noqa: F401

# isort: split
import msgspec
import nats.errors
from nats.aio.msg import Msg as NatsMsg
from nats.aio.subscription import Subscription as NatsSubscription
from nats.js.api import Header

from dynamo_local.core import codec
from dynamo_local.core.errors import BusError, DecodeError

_log = logging.getLogger(__name__)
_M = TypeVar("_M")

_DRAIN_S = 0.5


@dataclass(frozen=True)
class Message:
    """A message as bytes. `reply` is the subject to answer on, empty if no answer is wanted.

    `status` is not empty when the server speaks instead of a publisher, such as "503": a request has no subscriber.
    """

    subject: str
    reply: str
    data: bytes
    status: str = ""

    @classmethod
    def of(cls, message: NatsMsg) -> Message:
        status = "" if message.headers is None else message.headers.get(Header.STATUS, "")
        return cls(message.subject, message.reply, message.data, status)


Handler = Callable[[Message], Awaitable[None]]


class Publisher(Protocol):
    """The part of a bus that an answer needs."""

    async def send(self, subject: str, message: msgspec.Struct) -> None: ...


class Answer:
    """Answers one request. May be kept for later, used more than once (a stream), or not at all."""

    __slots__ = ("_bus", "_message")

    def __init__(self, bus: Publisher, message: NatsMsg) -> None:
        self._bus = bus
        self._message = message

    async def send(self, message: msgspec.Struct) -> None:
        """Publish an answer. A failure is logged, not raised: whoever asked has a deadline of its own."""
        if not self._message.reply:
            return
        try:
            await self._bus.send(self._message.reply, message)
        except BusError as error:
            _log.warning("a request on %s is not answered: %s", self._message.subject, error)


class Subscription:
    """A live subscription. Messages are handled one after another, in order."""

    def __init__(self, inner: NatsSubscription) -> None:
        self._inner = inner

    async def unsubscribe(self) -> None:
        """Take no more messages. Harmless on a closed bus."""
        try:
            await self._inner.unsubscribe()
        except (nats.errors.ConnectionClosedError, nats.errors.BadSubscriptionError):
            return

    async def drain(self) -> None:
        """Take no more messages, and return when those on their way have been handled. Harmless on a closed bus."""
        try:
            async with asyncio.timeout(_DRAIN_S):
                await self._inner.drain()  # type: ignore[no-untyped-call]
        except (nats.errors.Error, TimeoutError) as error:
            _log.debug("messages on %s may be lost: %s", self._inner.subject, error)
            await self.unsubscribe()


def decoded(message: NatsMsg, kind: type[_M] | UnionType) -> _M | None:
    """The content of a message; None, and a warning in the log, if the message is of another kind or version."""
    try:
        return codec.decode(message.data, kind)
    except DecodeError as error:
        _log.warning("a message on %s is ignored: %s", message.subject, error)
        return None
