"""JetStream behind a narrow port: streams kept on disk by the server, for the queue and the live settings.

Only an owner creates a stream; whoever else finds none is told so (StreamAbsentError). Each operation fails within a
deadline, and at once while the connection is down.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import nats.errors
from nats.aio.msg import Msg
from nats.js import JetStreamContext, api
from nats.js.errors import (
    APIError,
    BucketNotFoundError,
    KeyNotFoundError,
    NoStreamResponseError,
    NotFoundError,
    ServiceUnavailableError,
)

from dynamo_local.bus.nats import Bus
from dynamo_local.core.errors import BusError

DONE, PROGRESS, AGAIN, NEVER = Msg.Ack.Ack, Msg.Ack.Progress, Msg.Ack.Nak, Msg.Ack.Term
"""What the taker of a message tells the server: it is done, still at it, others may try, nobody shall."""

_OWNED = {"dynamo-local": "1"}
"""Metadata of streams that we have created, and thus may delete."""
_STORE_FAILED = 10077
"""The server's code for a message that a full stream does not take."""
_STREAM_FORM = "KV_{}"
"""Name of the stream that is a bucket."""
_SHORT_ACK_PARTS = 9
_VALUE_BYTES = 1024


class StreamAbsentError(BusError):
    """There is no such stream, consumer or bucket."""


class StreamFullError(BusError):
    """The stream takes no more messages."""


@dataclass(frozen=True)
class QueueLimits:
    """Bounds of a work queue. `ack_wait_s`: a message taken and not heard of for so long is delivered again."""

    messages: int
    message_bytes: int
    age_s: float
    ack_wait_s: float


@dataclass(frozen=True)
class ConsumerState:
    """`waiting` messages were never delivered, `in_hand` were and are not ended. All sequences up to `delivered` were
    delivered once or more often."""

    waiting: int
    in_hand: int
    delivered: int


@dataclass(frozen=True)
class StoredMessage:
    """A message in its stream."""

    sequence: int
    data: bytes
    age_s: float


class _Purged(msgspec.Struct):
    purged: int


def delivery_count(reply: str) -> int:
    """How often a message was delivered, 1 for the first time, by the subject on which it is to be acknowledged."""
    parts = reply.split(".")
    try:
        return int(parts[4 if len(parts) == _SHORT_ACK_PARTS else 6])
    except (IndexError, ValueError) as error:
        raise BusError(f"{reply!r} is no subject for acknowledgements") from error


class JetStream:
    """The streams that one connection reaches."""

    def __init__(self, bus: Bus, *, timeout_s: float) -> None:
        self._bus = bus
        self._timeout_s = timeout_s
        self._context: JetStreamContext = bus.jetstream(timeout_s=timeout_s)

    # For owners

    async def create_queue(self, name: str, subject: str, consumer: str, limits: QueueLimits) -> None:
        """A new, empty work queue of what is published on `subject`. One of the same name that we have left is
        replaced; raises BusError if somebody else has made it."""
        await self.delete(name)
        stream = api.StreamConfig(
            name=name,
            subjects=[subject],
            retention=api.RetentionPolicy.WORK_QUEUE,
            storage=api.StorageType.FILE,
            discard=api.DiscardPolicy.NEW,
            max_msgs=limits.messages,
            max_msg_size=limits.message_bytes,
            max_age=limits.age_s,
            metadata=_OWNED,
        )
        takers = api.ConsumerConfig(
            name=consumer,
            durable_name=consumer,
            ack_policy=api.AckPolicy.EXPLICIT,
            ack_wait=limits.ack_wait_s,
            max_ack_pending=-1,
        )
        with self._errors_of(f"stream {name}"):
            await self._context.add_stream(stream)
            await self._context.add_consumer(name, takers)

    async def create_bucket(self, name: str, changes: str) -> None:
        """A new, empty bucket. Changes, once they are stored, are published on `changes`, which ends in ".>", with the
        key in that place. Replaces and refuses like `create_queue`."""
        stream = _STREAM_FORM.format(name)
        await self.delete(stream)
        with self._errors_of(f"bucket {name}"):
            # Not the client's own way to make one, which leaves out the metadata.
            await self._context.add_stream(
                api.StreamConfig(
                    name=stream,
                    subjects=[f"$KV.{name}.>"],
                    storage=api.StorageType.FILE,
                    discard=api.DiscardPolicy.NEW,
                    max_msgs_per_subject=1,
                    max_msg_size=_VALUE_BYTES,
                    allow_rollup_hdrs=True,
                    deny_delete=True,
                    republish=api.RePublish(src=f"$KV.{name}.>", dest=changes),
                    metadata=_OWNED,
                )
            )

    async def delete(self, name: str) -> bool:
        """Delete a stream that we have made, if it is there. Raises BusError if it is not ours."""
        try:
            with self._errors_of(f"stream {name}"):
                info = await self._context.stream_info(name)
                if not _OWNED.items() <= (info.config.metadata or {}).items():
                    raise BusError(
                        f"NATS has a stream {name} that `dynamo serve` has not made",
                        "delete it, or use another namespace",
                    )
                return await self._context.delete_stream(name)
        except StreamAbsentError:
            return False

    async def delete_bucket(self, name: str) -> bool:
        """Delete a bucket that we have made, if it is there."""
        return await self.delete(_STREAM_FORM.format(name))

    # For everybody

    async def append(self, stream: str, subject: str, data: bytes) -> None:
        """Have a message stored. Raises StreamFullError. After a BusError it may be stored nevertheless."""
        with self._errors_of(f"stream {stream}"):
            await self._context.publish(subject, data, stream=stream)

    async def state(self, stream: str, consumer: str) -> ConsumerState:
        """How far the takers are."""
        with self._errors_of(f"stream {stream}"):
            info = await self._context.consumer_info(stream, consumer)
        return ConsumerState(info.num_pending or 0, info.num_ack_pending or 0, info.delivered.stream_seq)

    async def next_message(self, stream: str, subject: str, sequence: int) -> StoredMessage | None:
        """The first message from that sequence on, left where it is; None: there is no more."""
        with self._errors_of(f"stream {stream}"):
            try:
                found = await self._context.get_msg(stream, seq=sequence, subject=subject, next=True)
            except NotFoundError:
                # No more messages, or no stream?
                await self._context.stream_info(stream)
                return None
        stored_at = found.time.timestamp() if found.time is not None else time.time()
        return StoredMessage(found.seq or sequence, found.data or b"", max(0.0, time.time() - stored_at))

    async def purge(self, stream: str) -> int:
        """Drop all messages. Returns how many."""
        with self._errors_of(f"stream {stream}"):
            # The client's own call does not tell how many.
            await self._context.stream_info(stream)
            answer = await self._bus.request(
                f"{api.DEFAULT_PREFIX}.STREAM.PURGE.{stream}", b"{}", timeout_s=self._timeout_s
            )
        try:
            return msgspec.json.decode(answer, type=_Purged).purged
        except msgspec.DecodeError as error:
            raise BusError(f"stream {stream} was not purged: {answer[:200]!r}") from error

    async def read(self, bucket: str, keys: tuple[str, ...]) -> dict[str, bytes]:
        """The values of those of the keys that have one."""
        values: dict[str, bytes] = {}
        with self._errors_of(f"bucket {bucket}"):
            store = await self._context.key_value(bucket)
            for key in keys:
                try:
                    values[key] = (await store.get(key)).value or b""
                except KeyNotFoundError:
                    continue
        return values

    async def write(self, bucket: str, key: str, value: bytes) -> None:
        """Set a key."""
        with self._errors_of(f"bucket {bucket}"):
            store = await self._context.key_value(bucket)
            await store.put(key, value)

    @contextmanager
    def _errors_of(self, what: str) -> Iterator[None]:
        if not self._bus.connected:
            raise BusError(f"{what} cannot be reached: the connection to NATS is down")
        try:
            yield
        except (NotFoundError, BucketNotFoundError, NoStreamResponseError) as error:
            raise StreamAbsentError(f"NATS has no {what}") from error
        except APIError as error:
            if error.err_code == _STORE_FAILED:
                raise StreamFullError(f"{what} is full: {error.description}") from error
            if isinstance(error, ServiceUnavailableError):
                raise BusError(
                    f"{what}: NATS does not do JetStream: {error.description or 'nobody answers'}",
                    "enable it in the configuration of the NATS server",
                ) from error
            raise BusError(f"{what}: NATS refuses: {error.description or error}") from error
        except nats.errors.TimeoutError as error:
            raise BusError(f"{what}: no answer from NATS within {self._timeout_s:g} s") from error
        except (nats.errors.Error, ValueError) as error:
            raise BusError(f"{what}: {error}") from error
