"""The record on the bus that says which server owns a namespace (core/process/ownership.py)."""

from __future__ import annotations

from dynamo_local.bus import without_websockets  # noqa: F401

# isort: split
import msgspec
from nats.js import api
from nats.js.errors import BucketNotFoundError, KeyNotFoundError, KeyWrongLastSequenceError

from dynamo_local.bus.jetstream.streams import JetStream
from dynamo_local.bus.nats import Bus
from dynamo_local.core.errors import BusError
from dynamo_local.core.process.ownership import RECORD_VERSION, Owner, Record
from dynamo_local.core.subjects import OWNERS_BUCKET

# A bucket of JetStream whose keys are replaced only by who knows their last change: for records that several processes
# contend for.

# isort: split


class RevisionError(BusError):
    """The key has another revision than the one to replace."""


class Revisions(JetStream):
    """Buckets of that kind, as one connection reaches them."""

    async def keep_bucket(self, name: str, *, in_memory: bool) -> None:
        """Create a bucket that belongs to no server and outlives all, if there is none yet. `in_memory`: it ends with
        NATS, and a full disk does not close it."""
        with self._errors_of(f"bucket {name}"):
            try:
                await self._context.key_value(name)
            except BucketNotFoundError:
                storage = api.StorageType.MEMORY if in_memory else api.StorageType.FILE
                await self._add_stream(self._bucket(name, storage))

    async def read_revision(self, bucket: str, key: str) -> tuple[int, bytes]:
        """The value of a key, and the number of its last change; 0 if it was never set. Deleted, its value is empty."""
        with self._errors_of(f"bucket {bucket}"):
            store = await self._context.key_value(bucket)
            try:
                found = await store.get(key)
            except KeyNotFoundError as error:
                # What a deletion leaves has a number too, which a change must name.
                return (error.entry.revision or 0 if error.entry else 0), b""
        return found.revision or 0, found.value or b""

    async def replace(self, bucket: str, key: str, value: bytes, revision: int) -> int:
        """Set a key whose last change has this number. Returns the new one. Raises RevisionError if it has another."""
        with self._errors_of(f"bucket {bucket}"):
            store = await self._context.key_value(bucket)
            try:
                return await store.update(key, value, last=revision)
            except KeyWrongLastSequenceError as error:
                raise RevisionError(f"{key} in bucket {bucket} has changed") from error


_TIMEOUT_S = 2.0
_UNKNOWN = Owner("", "", "a machine with another release")


class BusRecord:
    """The record of one namespace. `in_memory`: where records are kept is made so that it ends with NATS. All methods
    raise BusError."""

    def __init__(self, bus: Bus, namespace: str, *, in_memory: bool = False) -> None:
        self._stream = Revisions(bus, timeout_s=_TIMEOUT_S)
        self._namespace = namespace
        self._in_memory = in_memory

    async def make_room(self) -> None:
        """Make what records are kept in, if it is not there."""
        await self._stream.keep_bucket(OWNERS_BUCKET, in_memory=self._in_memory)

    async def read(self) -> Record:
        """The record as it is."""
        return decoded(*await self._stream.read_revision(OWNERS_BUCKET, self._namespace))

    async def replace(self, revision: int, owner: Owner | None) -> int:
        """Replace the record of that revision. Returns the new one. Raises RevisionError if there is another by now.
        After another BusError it may be replaced nevertheless."""
        return await self._stream.replace(OWNERS_BUCKET, self._namespace, encoded(owner), revision)


def encoded(owner: Owner | None) -> bytes:
    """What a record holds; empty without an owner."""
    return b"" if owner is None else msgspec.msgpack.encode(owner)


def decoded(revision: int, data: bytes) -> Record:
    """The record that holds this. What another release has written is an owner nevertheless: it is alive as long as it
    renews that."""
    if not data:
        return Record(revision)
    try:
        owner = msgspec.msgpack.decode(data, type=Owner)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        owner = _UNKNOWN
    return Record(revision, owner if owner.v == RECORD_VERSION else _UNKNOWN)
