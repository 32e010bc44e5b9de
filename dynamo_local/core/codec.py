"""Encodes and decodes messages: msgpack by msgspec, one envelope with the version, and one error for all garbage.

The envelope is an array of two: the version, and the message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from types import UnionType
from typing import Any, Literal, TypeVar, overload

import msgspec

from dynamo_local.core.errors import DecodeError, DynamoError

VERSION = 3
"""Version of the wire format. Messages of another version are refused."""


class Message(msgspec.Struct, frozen=True):
    """What one process sends to another by itself, and not as a part of something else."""


_M = TypeVar("_M", bound=Message)
_PRODUCT = frozenset({"components", "dynamo_local", "state"})
_encoder = msgspec.msgpack.Encoder()
_any_version = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw])


def prepare_structs() -> None:
    """Have msgspec look at all struct types of the product that are imported. Call it before threads decode.

    msgspec 0.22 looks at a type when it is decoded for the first time, and notes what it knows before that is whole:
    another thread that decodes the type meanwhile ends the process.
    """
    for kind in _subclasses(msgspec.Struct):
        if kind.__module__.partition(".")[0] in _PRODUCT:
            msgspec.json.Decoder(kind)


def _subclasses(kind: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


def encode(message: Message) -> bytes:
    """A message as bytes."""
    return _encoder.encode((VERSION, message))


@overload
def decode(data: bytes, kind: type[_M]) -> _M: ...


@overload
def decode(data: bytes, kind: UnionType) -> Any: ...


def decode(data: bytes, kind: Any) -> Any:
    """Inverse of `encode`. `kind` is a message class or a union of tagged ones.

    Raises DecodeError for anything that is not a well-formed message of this kind and version.
    """
    return decoder(kind)(data)


@lru_cache(maxsize=64)
def decoder(kind: Any) -> Callable[[bytes], Any]:
    """`decode` for one kind, for those who decode many messages."""
    unpack = msgspec.msgpack.Decoder(tuple[Literal[VERSION], kind]).decode  # type: ignore[valid-type]

    def decode_kind(data: bytes) -> Any:
        try:
            return unpack(data)[1]
        except (msgspec.DecodeError, ValueError, RecursionError, DynamoError) as error:
            raise _refusal(data, kind, error) from error

    return decode_kind


def _refusal(data: bytes, kind: Any, error: Exception) -> DecodeError:
    try:
        version, _ = _any_version.decode(data)
    except (msgspec.DecodeError, RecursionError):
        version = VERSION
    if version == VERSION:
        return DecodeError(f"not a {getattr(kind, '__name__', str(kind))}: {error}")
    return DecodeError(
        f"message of version {version}, this process speaks version {VERSION}",
        "restart the server so that all of its processes run the same release",
    )
