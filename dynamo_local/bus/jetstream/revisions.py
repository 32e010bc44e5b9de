"""A bucket of JetStream whose keys are replaced only by who knows their last change: for records that several processes
contend for."""

from __future__ import annotations

from dynamo_local.bus import without_websockets  # noqa: F401

# isort: split
from nats.js import api
from nats.js.errors import BucketNotFoundError, KeyNotFoundError, KeyWrongLastSequenceError

from dynamo_local.bus.jetstream.streams import JetStream
from dynamo_local.core.errors import BusError


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
