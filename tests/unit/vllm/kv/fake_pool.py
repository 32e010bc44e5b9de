"""A block pool as vLLM's: hashes stand in it from the moment at which a step is scheduled to write their content."""

from __future__ import annotations

from collections.abc import Sequence


class FakePool:
    """`source.CachePool`, and what an engine does with its pool. Content is the hash that it belongs to."""

    def __init__(self, total: int) -> None:
        self._total = total
        self.references = [0] * total
        self.hashes: list[bytes | None] = [None] * total
        self.contents: list[bytes | None] = [None] * total
        self.free: list[int] = list(range(total))
        """The first is reused first."""

    @property
    def total(self) -> int:
        return self._total

    def refer(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if self.references[block] == 0:
                self.free.remove(block)
            self.references[block] += 1

    def give_up(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            assert self.references[block] > 0, f"block {block} is free already"
            self.references[block] -= 1
            if self.references[block] == 0:
                self.free.append(block)

    def references_to(self, block: int) -> int:
        return self.references[block]

    def find(self, block_hash: bytes) -> int | None:
        return self.hashes.index(block_hash) if block_hash in self.hashes else None

    def stands(self, block: int, block_hash: bytes) -> bool:
        return self.hashes[block] == block_hash

    def allocate(self, block_hash: bytes) -> int | None:
        """A block to be written, found by its hash at once. Its old content is gone from now on."""
        if not self.free:
            return None
        block = self.free.pop(0)
        self.references[block] = 1
        self.hashes[block] = block_hash
        self.contents[block] = None
        return block

    def write(self, block: int, block_hash: bytes) -> None:
        self.contents[block] = block_hash

    def take_back(self, block: int) -> None:
        """The step that was to write it has failed."""
        self.hashes[block] = None
