"""The record on the bus that says which server owns a namespace (core/process/ownership.py)."""

from __future__ import annotations

from dynamo_local.bus.jetstream.revisions import Revisions
from dynamo_local.bus.nats import Bus
from dynamo_local.core import codec
from dynamo_local.core.errors import DecodeError
from dynamo_local.core.process.ownership import Owner, Record
from dynamo_local.core.subjects import OWNERS_BUCKET

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
    return b"" if owner is None else codec.encode(owner)


def decoded(revision: int, data: bytes) -> Record:
    """The record that holds this. What another release has written is an owner nevertheless: it is alive as long as it
    renews that."""
    if not data:
        return Record(revision)
    try:
        return Record(revision, codec.decode(data, Owner))
    except DecodeError:
        return Record(revision, _UNKNOWN)
