"""What blocks are given to hold, and what a token drawn from them depends on.

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
    """A step fills the blocks from index `start` on, of a request's first ones."""

    blocks: tuple[int, ...]
    hashes: tuple[BlockHash, ...]
    start: int


def fill(memory: BlockMemory, filling: Filling) -> None:
    """Write what follows from the blocks before and the tokens (which the hash stands for)."""
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
    """None if the blocks hold what belongs there; otherwise a digest of what they hold."""
    seen = memory.read(blocks)
    if seen == list(hashes):
        return None
    return blake2b(b"".join(seen), digest_size=HASH_BYTES).digest()
