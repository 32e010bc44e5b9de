"""Streams and key-value buckets of JetStream, which NATS keeps on disk: for the prefill queue and the live settings.

Only an owner creates a stream; all others raise StreamAbsentError where there is none. Each operation fails within a
deadline, and at once while the connection is down.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dynamo_local.bus import without_websockets  # noqa: F401

# isort: split
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
from dynamo_local.core.errors import BusDownError, BusError

DONE, PROGRESS, AGAIN, NEVER = Msg.Ack.Ack, Msg.Ack.Progress, Msg.Ack.Nak, Msg.Ack.Term
"""Acknowledgements of a message: processed, still being processed, deliver it again, never deliver it again."""

_OWNED = {"dynamo-local": "1"}
"""Metadata of the streams that this program has created, and may delete."""
_STORE_FAILED = 10077
"""NATS error code: the stream is full and does not take the message."""
_TOO_FEW_SERVERS = (10005, 10074)
"""NATS error codes: no servers for so many replicas; the server is in no cluster that does JetStream."""
_NOT_NOW = 10008
"""NATS error code: JetStream cannot answer at present, such as while a cluster chooses its leader."""
_REPLICAS = 3
_STREAM_FORM = "KV_{}"
"""Name of the stream behind a bucket."""
_SHORT_ACK_PARTS = 9
"""Parts of an acknowledgement subject without domain and account."""
_VALUE_BYTES = 1024
"""Size of the largest value in a bucket."""


class StreamAbsentError(BusError):
    """The stream, consumer or bucket does not exist."""


class NoJetStreamError(BusError):
    """NATS does no JetStream."""


class StreamFullError(BusError):
    """The stream takes no more messages."""


@dataclass(frozen=True)
class QueueLimits:
    """Bounds of a work queue. `ack_wait_s`: a message delivered and not acknowledged for so long is delivered again."""

    messages: int
    message_bytes: int
    age_s: float
    ack_wait_s: float


@dataclass(frozen=True)
class ConsumerState:
    """Progress of a queue. `waiting`: messages never delivered; `in_hand`: delivered and not acknowledged. All messages
    up to the sequence number `delivered` were delivered at least once."""

    waiting: int
    in_hand: int
    delivered: int


@dataclass(frozen=True)
class StoredMessage:
    """A message in its stream."""

    sequence: int
    subject: str
    data: bytes
    age_s: float


class _Purged(msgspec.Struct):
    purged: int


def delivery_count(reply: str) -> int:
    """The number of this delivery of a message, from 1, as told by the subject for its acknowledgement (`reply`)."""
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

    async def create_queue(self, name: str, consumers: Mapping[str, str], limits: QueueLimits) -> None:
        """Create an empty work queue. `consumers`: by name, the subject whose messages each one delivers. Replaces a
        queue of that name that this program has made; raises BusError if somebody else has made it."""
        await self.delete(name)
        stream = api.StreamConfig(
            name=name,
            subjects=list(consumers.values()),
            retention=api.RetentionPolicy.WORK_QUEUE,
            storage=api.StorageType.FILE,
            discard=api.DiscardPolicy.NEW,
            max_msgs=limits.messages,
            max_msg_size=limits.message_bytes,
            max_age=limits.age_s,
            metadata=_OWNED,
        )
        with self._errors_of(f"stream {name}"):
            await self._add_stream(stream)
            for consumer, subject in consumers.items():
                await self._context.add_consumer(
                    name,
                    api.ConsumerConfig(
                        name=consumer,
                        durable_name=consumer,
                        filter_subject=subject,
                        ack_policy=api.AckPolicy.EXPLICIT,
                        ack_wait=limits.ack_wait_s,
                        max_ack_pending=-1,
                    ),
                )

    async def create_bucket(self, name: str, changes: str) -> None:
        """Create an empty bucket. Stored changes are published on `changes`, a subject that ends in ".>", with the key
        in that place. Replaces and refuses like `create_queue`."""
        await self.delete(_STREAM_FORM.format(name))
        with self._errors_of(f"bucket {name}"):
            republish = api.RePublish(src=f"$KV.{name}.>", dest=changes)
            await self._add_stream(self._bucket(name, republish=republish, metadata=_OWNED))

    async def delete(self, name: str) -> bool:
        """Delete a stream, if it exists. Returns whether it did. Raises BusError if this program has not made it."""
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
        """Delete a bucket, like `delete`."""
        return await self.delete(_STREAM_FORM.format(name))

    # For everybody

    async def append(self, stream: str, subject: str, data: bytes) -> None:
        """Store a message. Raises StreamFullError. After another BusError the message may be stored nevertheless."""
        with self._errors_of(f"stream {stream}"):
            await self._context.publish(subject, data, stream=stream)

    async def state(self, stream: str, consumer: str) -> ConsumerState:
        """How many messages wait, and how many have been delivered."""
        with self._errors_of(f"stream {stream}"):
            info = await self._context.consumer_info(stream, consumer)
        return ConsumerState(info.num_pending or 0, info.num_ack_pending or 0, info.delivered.stream_seq)

    async def next_message(self, stream: str, subject: str, sequence: int) -> StoredMessage | None:
        """Read the first message from that sequence on, without taking it; None if there is none."""
        with self._errors_of(f"stream {stream}"):
            try:
                found = await self._context.get_msg(stream, seq=sequence, subject=subject, next=True)
            except NotFoundError:
                # Also raised when there is no stream, for which this call raises.
                await self._context.stream_info(stream)
                return None
        stored_at = found.time.timestamp() if found.time is not None else time.time()
        age_s = max(0.0, time.time() - stored_at)
        return StoredMessage(found.seq or sequence, found.subject or subject, found.data or b"", age_s)

    async def purge(self, stream: str) -> int:
        """Drop all messages. Returns how many."""
        with self._errors_of(f"stream {stream}"):
            # The client's purge_stream does not return how many.
            await self._context.stream_info(stream)
            answer = await self._bus.request(
                f"{api.DEFAULT_PREFIX}.STREAM.PURGE.{stream}", b"{}", timeout_s=self._timeout_s
            )
        try:
            return msgspec.json.decode(answer, type=_Purged).purged
        except msgspec.DecodeError as error:
            raise BusError(f"stream {stream} was not purged: {answer[:200]!r}") from error

    async def read(self, bucket: str, keys: tuple[str, ...]) -> dict[str, bytes]:
        """Read the values of these keys; keys that are not set are left out."""
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

    def _bucket(self, name: str, storage: api.StorageType = api.StorageType.FILE, **more: Any) -> api.StreamConfig:
        """The stream behind a bucket. `more`: fields of its configuration."""
        # Not by the client's create_key_value, which cannot set metadata.
        return api.StreamConfig(
            name=_STREAM_FORM.format(name),
            subjects=[f"$KV.{name}.>"],
            storage=storage,
            discard=api.DiscardPolicy.NEW,
            max_msgs_per_subject=1,
            max_msg_size=_VALUE_BYTES,
            allow_rollup_hdrs=True,
            deny_delete=True,
            **more,
        )

    async def _add_stream(self, config: api.StreamConfig) -> None:
        """Create a stream, on three servers if NATS is a cluster that has so many: then it outlives one of them."""
        if self._bus.in_cluster:
            try:
                await self._context.add_stream(config, num_replicas=_REPLICAS)
            except APIError as error:
                if error.err_code not in _TOO_FEW_SERVERS:
                    raise
            else:
                return
        await self._context.add_stream(config)

    @contextmanager
    def _errors_of(self, what: str) -> Iterator[None]:
        if not self._bus.connected:
            raise BusDownError(f"{what} cannot be reached: the connection to NATS is down")
        try:
            yield
        except (NotFoundError, BucketNotFoundError, NoStreamResponseError) as error:
            raise StreamAbsentError(f"NATS has no {what}") from error
        except APIError as error:
            if error.err_code == _STORE_FAILED:
                raise StreamFullError(f"{what} is full: {error.description}") from error
            if isinstance(error, ServiceUnavailableError) and error.err_code != _NOT_NOW:
                raise NoJetStreamError(
                    f"{what}: NATS does not do JetStream: {error.description or 'nobody answers'}",
                    "enable it in the configuration of the NATS server",
                ) from error
            raise BusError(f"{what}: NATS refuses: {error.description or error}") from error
        except nats.errors.TimeoutError as error:
            raise BusError(f"{what}: no answer from NATS within {self._timeout_s:g} s") from error
        except (nats.errors.Error, ValueError) as error:
            raise BusError(f"{what}: {error}") from error
