"""Keys of KV blocks: the first 8 bytes of the engine's hash of a block, as an unsigned number.

An engine's hash covers the block's tokens and all before them, salt and adapter. So a key names a whole prefix, and
two prefixes of a fleet share a key only by chance: once in 2**64 pairs. A sequence of keys travels packed: 8 bytes for
each, little endian, which are the first bytes of the hashes themselves.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable

from dynamo_local.core.errors import DecodeError

KEY_BYTES = 8


def key_of(block_hash: bytes) -> int:
    """Key of the block with this hash, of at least 8 bytes."""
    return int.from_bytes(block_hash[:KEY_BYTES], "little")


def pack(keys: Collection[int]) -> bytes:
    """Keys as bytes."""
    return struct.pack(f"<{len(keys)}Q", *keys)


def pack_hashes(hashes: Iterable[bytes]) -> bytes:
    """Keys of the blocks with these hashes, as bytes."""
    return b"".join(block_hash[:KEY_BYTES] for block_hash in hashes)


def number_of(packed: bytes) -> int:
    """Number of packed keys. Raises DecodeError if a part of one is missing."""
    count, rest = divmod(len(packed), KEY_BYTES)
    if rest:
        raise DecodeError(f"{len(packed)} bytes are no whole number of block keys")
    return count


def unpack(packed: bytes) -> tuple[int, ...]:
    """Inverse of `pack`. Raises DecodeError if a part of a key is missing."""
    return struct.unpack(f"<{number_of(packed)}Q", packed)
