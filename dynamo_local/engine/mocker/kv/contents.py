"""Contents of blocks, and how the tokens drawn from them depend on those.

As with attention, both follow from everything that the blocks before hold: as long as each holds what belongs
there, a block's content is its hash and tokens are those of `tokens.py`; otherwise neither is.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from dynamo_local.engine.mocker.kv.blocks import HASH_BYTES, BlockHash
from dynamo_local.engine.mocker.kv.memory import BlockMemory


@dataclass(frozen=True)
class Filling:
    """First blocks of a request, of which a step fills those from index `start` on."""

    blocks: tuple[int, ...]
    hashes: tuple[BlockHash, ...]
    start: int


def fill(memory: BlockMemory, filling: Filling) -> None:
    """Write the contents that follow from the blocks before and the tokens (which the hash stands for)."""
    start, blocks, hashes = filling.start, filling.blocks, filling.hashes
    foreign = foreign_content(memory, blocks[:start], hashes[:start])
    for block, block_hash in zip(blocks[start:], hashes[start:], strict=True):
        content = block_hash
        if foreign is not None:
            content = blake2b(foreign + block_hash, digest_size=HASH_BYTES).digest()
        memory.write(block, content)


def foreign_content(
    memory: BlockMemory, blocks: tuple[int, ...] | list[int], hashes: tuple[BlockHash, ...] | list[BlockHash]
) -> bytes | None:
    """Compare blocks with the hashes that belong there. Returns None if all match, else a digest of the contents."""
    seen = memory.read(blocks)
    if seen == list(hashes):
        return None
    return blake2b(b"".join(seen), digest_size=HASH_BYTES).digest()
