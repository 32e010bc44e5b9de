"""One connection to NATS: messages (`send`, `listen`), requests (`ask`, `serve`), and both as plain bytes.

Delivery is at most once. While the connection is down, publications are buffered up to a bound, and subscriptions are
restored on reconnection; messages that others published meanwhile are lost. The protocols above notice this by sequence
numbers, positions and leases. Errors of the NATS client become BusError here.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import TypeVar

from dynamo_local.bus import without_websockets  # noqa: F401

# isort: split
import nats
import nats.errors
from nats.aio.msg import Msg as NatsMsg
from nats.aio.subscription import Subscription as NatsSubscription
from nats.js import JetStreamContext
from nats.js.api import Header
from nats.protocol.parser import AUTHORIZATION_VIOLATION as _REFUSED

from dynamo_local.bus.address import BusAddress
from dynamo_local.bus.renewal import Asks, Exchange, KnownAddress
from dynamo_local.bus.tls import TlsClient, context_of, is_final, local_host, mismatch
from dynamo_local.core import codec
from dynamo_local.core.codec import Message
from dynamo_local.core.errors import BusError, BusRefusedError, DecodeError, NobodyListensError
from dynamo_local.core.messages.admin import AddressChanged, AddressTaken
from dynamo_local.core.messages.reports import Event
from dynamo_local.core.subjects import Subjects
from dynamo_local.tasks import TaskGuard

_log = logging.getLogger(__name__)


_M = TypeVar("_M", bound=Message)

_CONNECT_TIMEOUT_S = 2
_RECONNECT_WAIT_S = 0.2
_PING_INTERVAL_S = 5
_CONNECTION_ERRORS = (OSError, nats.errors.UnexpectedEOF, nats.errors.StaleConnectionError)
_PENDING_BYTES = 32 * 1024 * 1024
"""Size of the buffer for publications while the connection is down."""
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


async def _contained(message: NatsMsg, handling: Awaitable[None]) -> None:
    try:
        await handling
    except Exception:  # noqa: BLE001
        # The boundary of a message: one that cannot be handled must end neither the subscription nor the process.
        _log.exception("message on %s could not be handled", message.subject)


def _reader(kind: type[_M] | UnionType) -> Callable[[NatsMsg], _M | None]:
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


@contextmanager
def _cancelled_for_good() -> Iterator[None]:
    """Have a cancellation of the task count within. The client waits by asyncio.wait_for, which swallows one that comes
    together with the answer, or with the notice that there is none (python/cpython#86296, fixed in Python 3.12)."""
    task = asyncio.current_task()
    cancelled = task.cancelling() if task is not None else 0
    try:
        yield
    finally:
        if task is not None and task.cancelling() > cancelled:
            raise asyncio.CancelledError


class Bus:
    """The connection of one process to NATS."""

    def __init__(self, client: TlsClient, name: str) -> None:
        self._client = client
        self._name = name
        self._was_connected = False
        self._lost_at: float | None = None
        """Time at which the connection was lost (CLOCK_MONOTONIC, s); None while there is one."""
        self._closing = False
        self._ended = asyncio.Event()
        self._asks = Asks()
        self._known: KnownAddress | None = None
        self._exchange: Exchange | None = None

    @classmethod
    async def connect(
        cls, address: BusAddress, *, name: str, deadline_s: float = 10.0, file: Path | None = None
    ) -> Bus:
        """Connect within `deadline_s`; a connection that is lost later is restored for ever. Raises BusError.

        A server that refuses the token (BusRefusedError) is not asked again, or once if there is a `file`, which holds
        the address, and as long as the address changes. It is read again as well when the connection is lost.
        """
        known, attempts = KnownAddress(address, file), 0 if file is None else 1
        while True:
            try:
                return await cls._connected(known, name, deadline_s)
            except BusRefusedError:
                # While it takes up its configuration, NATS refuses whoever connects.
                if not await known.read_again() and not attempts:
                    raise
                attempts = 0

    @classmethod
    async def _connected(cls, known: KnownAddress, name: str, deadline_s: float) -> Bus:
        client, address = TlsClient(), known.current
        client.wants_tls = address.wants_tls
        bus = cls(client, name)
        try:
            async with asyncio.timeout(deadline_s):
                await bus._connect(known)
        except nats.errors.AuthorizationError as error:
            await bus._abandon()
            raise BusRefusedError(f"NATS at {address.shown} refuses the token", "check the token") from error
        except ssl.SSLError as error:
            await bus._abandon()
            raise mismatch(address, error) from error
        except (TimeoutError, OSError, ValueError, nats.errors.Error) as error:
            cause = str(error) or str(bus._client.last_error or "") or "it does not answer"
            await bus._abandon()
            raise BusError(
                f"cannot connect to NATS at {address.shown} within {deadline_s:g} s: {cause}",
                "check that it runs and that the address is right",
            ) from error
        bus._was_connected = True
        return bus

    async def _connect(self, known: KnownAddress) -> None:
        address, exchange = known.current, Exchange(self._client, known, self._asks)
        self._known, self._exchange = known, exchange
        has_user = address.user is not None
        await self._client.connect(
            list(address.urls),
            tls=context_of(address),
            user=exchange.user if has_user else None,
            password=exchange.token if has_user else None,
            token=None if has_user or address.token is None else exchange.token,
            name=self._name,
            connect_timeout=_CONNECT_TIMEOUT_S,
            reconnect_time_wait=_RECONNECT_WAIT_S,  # type: ignore[arg-type]  # used as seconds, fractions work
            max_reconnect_attempts=-1,
            ping_interval=_PING_INTERVAL_S,
            pending_size=_PENDING_BYTES,
            # Subjects are built in core.subjects alone, from parts that were checked.
            skip_subject_validation=True,
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnect,
            reconnected_cb=self._on_reconnect,
            closed_cb=self._on_closed,
        )

    async def renew(self) -> str | None:
        """Connect by the address that the file holds now, if it is another one than before. Returns the user of the
        connection; None for a server without users."""
        assert self._exchange is not None, "a part of a connection, or one that was never made"
        return await self._exchange.renew()

    async def _abandon(self) -> None:
        """Close what failed attempts to connect have left open; nothing if the address was not valid."""
        if self._client.servers:
            await self.close()

    @property
    def connected(self) -> bool:
        return self._client.is_connected

    @property
    def secure_host(self) -> str:
        """This machine's address on the connection, if that is on TLS and leads to other machines. Empty otherwise, and
        while there is no connection."""
        return local_host(self._client)

    @property
    def connections(self) -> int:
        """How often the connection has been made anew. What was published in between has not been heard."""
        return self._client.stats["reconnects"]

    @property
    def max_payload(self) -> int:
        """Size of the largest message that the server takes, in bytes."""
        return self._client.max_payload

    @property
    def in_cluster(self) -> bool:
        """Whether the server is one of a cluster, as it said when it was connected to."""
        return "cluster" in self._client._server_info

    def jetstream(self, *, timeout_s: float) -> JetStreamContext:
        """JetStream over this connection, for bus/jetstream/streams.py alone."""
        return self._client.jetstream(timeout=timeout_s)

    def inbox(self) -> str:
        """A new subject that nobody else uses."""
        return self._client.new_inbox()

    async def send(self, subject: str, message: Message, *, reply: str = "") -> None:
        """Publish a message. Raises BusError like `publish`. `reply`: subject on which answers are heard, any number of
        them; who waits for one asks."""
        await self.publish(subject, codec.encode(message), reply=reply)

    async def ask(self, subject: str, message: Message, reply: type[_M] | UnionType, *, timeout_s: float) -> _M:
        """Ask with a message, and wait for one answer of type `reply`. Raises BusError like `request`, and DecodeError
        if the answer is something else."""
        return codec.decode(await self.request(subject, codec.encode(message), timeout_s=timeout_s), reply)

    async def listen(
        self, subject: str, kind: type[_M] | UnionType, handler: Callable[[_M], Awaitable[None]], *, queue: str = ""
    ) -> Subscription:
        """Have `handler` called for each message of this kind, a message class or a union of tagged ones. What cannot
        be decoded is logged and dropped. Otherwise as `subscribe`."""
        read = _reader(kind)

        async def receive(message: NatsMsg) -> None:
            if (content := read(message)) is not None:
                await handler(content)

        return await self._subscribe(subject, receive, queue)

    async def listen_each(
        self, pattern: str, kind: type[_M] | UnionType, handler: Callable[[str, _M], Awaitable[None]]
    ) -> Subscription:
        """As `listen`, on all subjects that match: `handler` is told what stands for the first `*` of the pattern, such
        as an endpoint's revision."""
        read, place = _reader(kind), pattern.split(".").index("*")

        async def receive(message: NatsMsg) -> None:
            if (content := read(message)) is not None:
                await handler(message.subject.split(".")[place], content)

        return await self._subscribe(pattern, receive)

    async def serve(
        self,
        subject: str,
        kind: type[_M] | UnionType,
        handler: Callable[[_M], Awaitable[Message | None]],
        *,
        queue: str = "",
        tasks: TaskGuard | None = None,
    ) -> Subscription:
        """Answer each request (`ask`) with what `handler` returns; None answers nothing. Otherwise as `listen`.

        With `tasks`, each is handled in a task of its own there, begun in order; without, those behind one that takes
        long wait. Subscribers with the same `queue` share the requests.
        """
        return await self._serve(subject, kind, lambda _, request: handler(request), queue, tasks)

    async def serve_each(
        self,
        pattern: str,
        kind: type[_M] | UnionType,
        handler: Callable[[str, _M], Awaitable[Message | None]],
        *,
        queue: str = "",
        tasks: TaskGuard | None = None,
    ) -> Subscription:
        """`serve` on all subjects that match, as `listen_each`."""
        place = pattern.split(".").index("*")
        return await self._serve(
            pattern, kind, lambda on, request: handler(on.split(".")[place], request), queue, tasks
        )

    async def _serve(
        self,
        subject: str,
        kind: type[_M] | UnionType,
        handle: Callable[[str, _M], Awaitable[Message | None]],
        queue: str,
        tasks: TaskGuard | None,
    ) -> Subscription:
        read = _reader(kind)

        async def answer(message: NatsMsg, request: _M) -> None:
            reply = await handle(message.subject, request)
            if reply is None or not message.reply:
                return
            try:
                await self.send(message.reply, reply)
            except BusError as error:
                # Not raised: whoever asked has a deadline of its own.
                _log.warning("a request on %s is not answered: %s", message.subject, error)

        async def receive(message: NatsMsg) -> None:
            if (request := read(message)) is None:
                return
            if tasks is None:
                await answer(message, request)
            else:
                tasks.spawn(f"answer {type(request).__name__}", _contained(message, answer(message, request)))

        return await self._subscribe(subject, receive, queue)

    async def publish(self, subject: str, data: bytes, *, reply: str = "") -> None:
        """Send bytes to all who subscribe. Raises BusError if they are too many or the buffer is full."""
        try:
            await self._client.publish(subject, data, reply)
        except nats.errors.MaxPayloadError as error:
            raise BusError(f"message of {len(data)} bytes, NATS takes at most {self.max_payload}") from error
        except nats.errors.Error as error:
            raise BusError(f"cannot publish on {subject}: {error}") from error

    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "") -> Subscription:
        """Have `handler` called for each message, one after another. Subscribers with the same `queue` share them.

        A handler that raises is logged, and only that message is lost. Raises BusError.
        """

        async def receive(message: NatsMsg) -> None:
            await handler(RawMessage.of(message))

        return await self._subscribe(subject, receive, queue)

    async def _subscribe(
        self, subject: str, receive: Callable[[NatsMsg], Awaitable[None]], queue: str = ""
    ) -> Subscription:
        async def deliver(message: NatsMsg) -> None:
            await _contained(message, receive(message))

        try:
            return Subscription(await self._client.subscribe(subject, queue=queue, cb=deliver))
        except nats.errors.Error as error:
            raise BusError(f"cannot subscribe to {subject}: {error}") from error

    async def failed(self) -> None:
        """Wait until the connection has ended for good (the server refuses this client), then raise BusError.

        Never returns. A connection that is only lost has not ended: it is restored.
        """
        await self._ended.wait()
        raise BusError(f"NATS ended the connection: {self._client.last_error or 'closed'}")

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        """Send bytes and wait for one answer. Raises NobodyListensError, and BusError when none answers in time."""
        return await self._asks.run(lambda left_s: self._request(subject, data, left_s), timeout_s)

    async def _request(self, subject: str, data: bytes, timeout_s: float) -> bytes:
        try:
            with _cancelled_for_good():
                return (await self._client.request(subject, data, timeout=timeout_s)).data
        except nats.errors.NoRespondersError as error:
            raise NobodyListensError(f"no process listens on {subject}") from error
        except nats.errors.TimeoutError as error:
            raise BusError(f"no answer on {subject} within {timeout_s:.3g} s") from error
        except nats.errors.Error as error:
            raise BusError(f"cannot ask on {subject}: {error}") from error

    async def flush(self, *, timeout_s: float = 2.0) -> None:
        """Wait until the server has seen everything published so far. Raises BusError."""
        try:
            # Twice: the client sends its ping ahead of its buffer, so that the first answer says nothing about the
            # buffer. But the buffer has been written when the second ping is sent.
            with _cancelled_for_good():
                await self._client.flush(timeout=timeout_s)  # type: ignore[arg-type]  # used as seconds
                await self._client.flush(timeout=timeout_s)  # type: ignore[arg-type]  # used as seconds
        except (nats.errors.Error, OSError) as error:
            raise BusError(f"NATS did not confirm within {timeout_s:g} s") from error

    async def close(self, *, deadline_s: float = 2.0) -> None:
        """Send what is pending if the server still listens, then disconnect."""
        self._closing = True
        if self._client.is_connected:
            try:
                await self.flush(timeout_s=deadline_s)
            except BusError as error:
                _log.warning("messages may be lost, since the connection to NATS closes: %s", error)
        try:
            async with asyncio.timeout(deadline_s):
                await self._client.close()
        except TimeoutError:
            _log.warning("the connection to NATS did not close within %g s", deadline_s)
        except (OSError, nats.errors.Error) as error:
            _log.warning("messages that were not sent yet are lost: %s", error)

    async def _on_error(self, error: Exception) -> None:
        if not self._was_connected and _REFUSED in str(error).lower():
            # Raised to leave the client's loop of attempts: another attempt would be refused as well. (At this stage
            # the client has no exception class for it, only the server's text.)
            raise nats.errors.AuthorizationError from error
        if not self._was_connected and is_final(error):
            raise error
        # Until the first connection `connect` raises an error that says the same. Later the end of a connection is an
        # error, and so is each failed attempt to reconnect: all are the one line of `_on_disconnect`.
        of_connection = self._lost_at is not None or isinstance(error, _CONNECTION_ERRORS) or not self._was_connected
        level = logging.DEBUG if of_connection else logging.WARNING
        _log.log(level, "error of the NATS client: %s", str(error) or type(error).__name__)
        if self._was_connected and _REFUSED in str(error).lower():
            await self._read_address()

    async def _on_disconnect(self) -> None:
        if self._closing or self._lost_at is not None:
            return
        self._lost_at = time.monotonic()
        if self._exchange is not None and self._exchange.is_under_way:
            _log.info("NATS has another token: connecting by that")
        else:
            _log.warning("NATS connection lost; reconnecting")
            # The server ends the connections of a token that was replaced.
            await self._read_address()

    async def _read_address(self) -> None:
        if self._known is not None and await self._known.read_again():
            _log.info("NATS has another token: connecting by that")

    async def _on_reconnect(self) -> None:
        lost_at, self._lost_at = self._lost_at, None
        if self._exchange is not None:
            self._exchange.reconnected.set()
            if self._exchange.is_under_way:
                return
        if lost_at is not None:
            _log.warning("NATS reconnected after %.1f s", time.monotonic() - lost_at)

    async def _on_closed(self) -> None:
        if not self._closing:
            self._ended.set()


# A part of a process's connection to NATS, whose subscriptions end together.


class BusPart(Bus):
    """Uses the connection of another bus. `close` ends the subscriptions that were made here, and nothing else."""

    def __init__(self, bus: Bus) -> None:
        super().__init__(bus._client, bus._name)
        self._asks = bus._asks
        self._subscriptions: list[Subscription] = []

    async def close(self, *, deadline_s: float = 2.0) -> None:
        """End all subscriptions made here."""
        subscriptions, self._subscriptions = self._subscriptions, []
        for subscription in subscriptions:
            await subscription.unsubscribe()

    async def _subscribe(
        self, subject: str, receive: Callable[[NatsMsg], Awaitable[None]], queue: str = ""
    ) -> Subscription:
        subscription = await super()._subscribe(subject, receive, queue)
        self._subscriptions.append(subscription)
        return subscription


# Takes up a new token of NATS when the server says so (supervisor/server/nats/rotation.py).


async def follow_address(bus: Bus, subjects: Subjects, lease: str = "") -> None:
    """Connect anew whenever the address has changed, and tell the server. `lease`: of this process, if it has one.

    A process that does not hear of a change is disconnected when the old token ends, and finds the new one then.
    """

    async def on_change(_: AddressChanged) -> AddressTaken:
        return AddressTaken(lease, await bus.renew())

    await bus.serve(subjects.address_changes, AddressChanged, on_change)


# Publishes events (core/messages/reports.py) to the server, which writes them down.


async def publish_event(bus: Bus, subjects: Subjects, event: Event) -> None:
    """Publish an event. A failure is logged, not raised: no work depends on the record of it."""
    try:
        await bus.send(subjects.events, event)
    except BusError as error:
        _log.info("an event is not recorded (%s): %s", event.what, error)
