"""Messages that subscriptions bring, and the answers to requests. Subscriptions are made by `Bus` (nats.py)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import UnionType
from typing import TypeVar

from dynamo_local.bus import without_websockets  # noqa: F401

# isort: split
import nats.errors
from nats.aio.msg import Msg as NatsMsg
from nats.aio.subscription import Subscription as NatsSubscription
from nats.js.api import Header

from dynamo_local.core import codec
from dynamo_local.core.codec import Message
from dynamo_local.core.errors import BusError, DecodeError

_log = logging.getLogger(__name__)
_M = TypeVar("_M", bound=Message)

_DRAIN_S = 0.5


@dataclass(frozen=True)
class RawMessage:
    """A message as bytes. `reply` is the subject to answer on, empty if no answer is wanted.

    `status` is not empty when the server speaks instead of a publisher, such as "503": a request has no subscriber.
    """

    subject: str
    reply: str
    data: bytes
    status: str = ""

    @classmethod
    def of(cls, message: NatsMsg) -> RawMessage:
        status = "" if message.headers is None else message.headers.get(Header.STATUS, "")
        return cls(message.subject, message.reply, message.data, status)


Handler = Callable[[RawMessage], Awaitable[None]]
Send = Callable[[str, Message], Awaitable[None]]
"""Publishes a message on a subject (`Bus.send`)."""


class Answer:
    """Answers one request. May be kept for later, used more than once (a stream), or not at all."""

    __slots__ = ("_message", "_send")

    def __init__(self, send: Send, message: NatsMsg) -> None:
        self._send = send
        self._message = message

    async def send(self, message: Message) -> None:
        """Publish an answer. A failure is logged, not raised: whoever asked has a deadline of its own."""
        if not self._message.reply:
            return
        try:
            await self._send(self._message.reply, message)
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


def reader(kind: type[_M] | UnionType) -> Callable[[NatsMsg], _M | None]:
    """A function that returns the content of a message; None, and a warning in the log, if the message is of another
    kind or version."""
    decode = codec.decoder(kind)

    def read(message: NatsMsg) -> _M | None:
        try:
            content: _M = decode(message.data)
        except DecodeError as error:
            _log.warning("a message on %s is ignored: %s", message.subject, error)
            return None
        return content

    return read
