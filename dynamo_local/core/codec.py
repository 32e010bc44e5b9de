"""Encodes and decodes messages: msgpack by msgspec, with a version in each message, and one error for all garbage."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from types import UnionType
from typing import Any, TypeVar, overload

import msgspec

from dynamo_local.core.errors import DecodeError, DynamoError

VERSION = 2
"""Version of the wire format. Messages of another version are refused."""

_T = TypeVar("_T")
_PRODUCT = frozenset({"components", "dynamo_local", "state"})
_encoder = msgspec.msgpack.Encoder()


@lru_cache(maxsize=64)
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


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


def encode(message: msgspec.Struct) -> bytes:
    """A message as bytes."""
    return _encoder.encode(message)


@overload
def decode(data: bytes, kind: type[_T]) -> _T: ...


@overload
def decode(data: bytes, kind: UnionType) -> Any: ...


def decode(data: bytes, kind: Any) -> Any:
    """Inverse of `encode`. `kind` is a message class or a union of tagged ones.

    Raises DecodeError for anything that is not a well-formed message of this kind and version.
    """
    try:
        message = _decoder(kind).decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError, DynamoError) as error:
        name = getattr(kind, "__name__", str(kind))
        raise DecodeError(f"not a {name}: {error}") from error
    if message.v != VERSION:
        raise DecodeError(
            f"message of version {message.v}, this process speaks version {VERSION}",
            "restart the server so that all of its processes run the same release",
        )
    return message
