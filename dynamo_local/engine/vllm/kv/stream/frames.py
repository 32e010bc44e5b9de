"""What reader and source say to each other on a stream, inside TLS.

    reader  MAGIC, secret                      once
    reader  number, count, count pieces        each read, or a part of it
    source  number, bytes, those bytes         for each, in the order in which they were asked for

Numbers are little-endian; a piece is an address and a length, of 8 bytes each. A source that does not serve what it is
asked for ends the connection. Sizes are bounded, where things come in.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Annotated

import msgspec
import numpy as np

from dynamo_local.core.errors import EngineError
from dynamo_local.engine.vllm.kv.memory_agent import Pieces

MAGIC = b"DYNAMOKV"
SECRET_BYTES = 32
HELLO_BYTES = len(MAGIC) + SECRET_BYTES

REQUEST = struct.Struct("<QI")
REPLY = struct.Struct("<QQ")
PIECE_BYTES = 16
MOST_PIECES = 1 << 13
"""Of a request: 128 KiB."""
MOST_BYTES = 1 << 30
"""Of a reply."""

_Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class StreamAddress(msgspec.Struct, frozen=True, array_like=True):
    """Where a source listens, and how the two know each other. It crosses the bus, to members of the namespace alone.

    `fingerprint`: SHA-256 of the source's certificate (DER). `secret`: what a reader has to say first.
    """

    host: Annotated[str, msgspec.Meta(max_length=64)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    fingerprint: _Digest
    secret: _Digest

    def __repr__(self) -> str:
        return f"StreamAddress({self.host!r}, {self.port})"


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(StreamAddress)


def pack_address(address: StreamAddress) -> bytes:
    return _encoder.encode(address)


def unpack_address(data: bytes) -> StreamAddress:
    """Raises msgspec.DecodeError."""
    return _decoder.decode(data)


def requests_of(remote: Pieces) -> Iterator[tuple[slice, int]]:
    """Split a read into requests that a source takes: which pieces, and their bytes."""
    begin, size = 0, 0
    for index, length in enumerate(remote[:, 1].tolist()):
        if index > begin and (index - begin == MOST_PIECES or size + length > MOST_BYTES):
            yield slice(begin, index), size
            begin, size = index, 0
        size += length
    if begin < len(remote):
        yield slice(begin, len(remote)), size


def pack_request(number: int, pieces: Pieces) -> bytes:
    return REQUEST.pack(number, len(pieces)) + np.ascontiguousarray(pieces, dtype="<u8").tobytes()


def unpack_request(header: bytes) -> tuple[int, int]:
    """Number, and how many pieces follow. Raises EngineError."""
    number, count = REQUEST.unpack(header)
    if not 0 < count <= MOST_PIECES:
        raise EngineError(f"a reader of KV asks for {count} pieces at once")
    return number, count


def unpack_pieces(data: bytes) -> Pieces:
    pieces: Pieces = np.frombuffer(data, dtype="<u8").reshape(-1, 2).astype(np.uint64)
    return pieces
