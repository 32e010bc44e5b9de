from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dynamo_local.core.routing.caches.index import KEY_BYTES
from dynamo_local.engine.mocker.blocks import BlockHash, BlockPool, chain_hash, chain_hashes, root_hash

TOTAL = 6
HASHES = [bytes([i]) * KEY_BYTES for i in range(9)]


def keys_in(packed: bytes) -> list[bytes]:
    return [packed[start : start + KEY_BYTES] for start in range(0, len(packed), KEY_BYTES)]


class PoolMachine(RuleBasedStateMachine):
    """A pool against a model: who refers to which blocks, and what each block was filled with."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(TOTAL)
        self.held: list[list[int]] = []
        self.told: set[bytes] = set()
        """Keys of what is cached, by the pool's log."""
        self.content: dict[int, BlockHash] = {}
        """Hashes as last registered, of blocks that were not taken for something else since."""

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, self.pool.free))
        referenced = self.referenced()
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count
        assert not referenced & set(blocks)
        for block in blocks:
            self.content.pop(block, None)
        self.held.append(blocks)

    @rule(count=st.integers(1, TOTAL + 1))
    def refuse_to_allocate_more_than_is_free(self, count: int) -> None:
        with pytest.raises(ValueError, match="free"):
            self.pool.allocate(self.pool.free + count)

    @rule(hashes=st.lists(st.sampled_from(HASHES), unique=True, max_size=4))
    def refer_to_what_is_cached(self, hashes: list[BlockHash]) -> None:
        blocks = self.pool.match(hashes)
        assert [self.content[block] for block in blocks] == hashes[: len(blocks)]
        if len(blocks) < len(hashes):
            assert hashes[len(blocks)] not in self.content.values()
        beside = self.pool.free_beside(blocks)
        self.pool.refer(blocks)
        assert self.pool.free == beside
        self.held.append(blocks)

    @rule()
    def empty(self) -> None:
        emptied = self.pool.empty()
        assert emptied == (not self.referenced())
        if emptied:
            self.content.clear()
            assert self.pool.free == TOTAL

    @precondition(lambda self: any(self.held))
    @rule(data=st.data(), block_hash=st.sampled_from(HASHES))
    def register(self, data: st.DataObject, block_hash: BlockHash) -> None:
        block = data.draw(st.sampled_from(sorted(self.referenced())))
        self.pool.register(block, block_hash)
        if block not in self.content and block_hash not in self.content.values():
            self.content[block] = block_hash

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        self.pool.give_up(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @invariant()
    def references_are_those_held(self) -> None:
        counts = Counter(block for blocks in self.held for block in blocks)
        assert [self.pool.references_to(block) for block in range(TOTAL)] == [counts[b] for b in range(TOTAL)]

    @invariant()
    def a_block_is_free_or_referenced(self) -> None:
        assert self.pool.free + len(self.referenced()) == TOTAL

    @invariant()
    def each_content_is_found_in_its_block(self) -> None:
        assert {self.pool.match([block_hash])[0]: block_hash for block_hash in self.content.values()} == self.content

    @invariant()
    def the_log_tells_what_is_cached(self) -> None:
        if (changes := self.pool.log.take()) is not None:
            removed, stored = set(keys_in(changes.removed)), set(keys_in(changes.stored))
            self.told = ((set() if changes.cleared else self.told) - removed) | stored
        assert self.told == set(self.content.values())

    def referenced(self) -> set[int]:
        return {block for blocks in self.held for block in blocks}


TestPool = PoolMachine.TestCase


def filled(pool: BlockPool, *hashes: BlockHash) -> list[int]:
    blocks = pool.allocate(len(hashes))
    for block, block_hash in zip(blocks, hashes, strict=True):
        pool.register(block, block_hash)
    return blocks


def test_the_longest_free_block_is_evicted_first_and_blank_ones_before_it() -> None:
    pool = BlockPool(4)
    first, second = filled(pool, b"1"), filled(pool, b"2")
    blank = pool.allocate(1)
    pool.give_up(second)
    pool.give_up(first)
    pool.give_up(blank)
    pool.allocate(2)
    assert pool.match([b"1"])
    assert pool.match([b"2"])
    pool.allocate(1)
    assert pool.match([b"1"])
    assert not pool.match([b"2"])


def test_a_hit_makes_a_block_the_last_to_be_evicted() -> None:
    pool = BlockPool(2)
    for block_hash in (b"1", b"2"):
        pool.give_up(filled(pool, block_hash))
    hit = pool.match([b"1"])
    pool.refer(hit)
    pool.give_up(hit)
    pool.allocate(1)
    assert pool.match([b"1"])
    assert not pool.match([b"2"])


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    pool = BlockPool(3)
    pool.give_up(filled(pool, b"1", b"2", b"3"))
    pool.allocate(1)
    assert len(pool.match([b"1", b"2", b"3"])) == 2


def test_without_a_cache_free_blocks_are_found_by_nobody_and_taken_first() -> None:
    pool = BlockPool(4, keep_freed=False)
    first, second = filled(pool, b"1"), filled(pool, b"2")
    pool.refer(pool.match([b"1"]))
    pool.give_up(first)
    pool.give_up(second)
    assert pool.match([b"1"]) == first
    assert pool.match([b"2"]) == []
    assert pool.allocate(1) == second
    pool.give_up(first)
    assert pool.match([b"1"]) == []
    assert pool.allocate(1) == first


def test_a_shared_block_is_free_only_when_nobody_refers_to_it() -> None:
    pool = BlockPool(2)
    blocks = filled(pool, b"1")
    pool.refer(pool.match([b"1"]))
    pool.give_up(blocks)
    assert pool.free == 1
    pool.give_up(blocks)
    assert pool.free == 2


@given(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=32), st.data())
def test_a_hash_names_tokens_their_order_and_what_precedes_them(token_ids: list[int], data: st.DataObject) -> None:
    other = data.draw(st.permutations(token_ids))
    parent = root_hash(None, None)
    assert (chain_hash(parent, token_ids) == chain_hash(parent, other)) == (token_ids == other)
    assert chain_hash(root_hash("salt", None), token_ids) != chain_hash(parent, token_ids)
    assert chain_hash(chain_hash(parent, token_ids), token_ids) != chain_hash(parent, token_ids)


def test_salts_and_adapters_differ_and_none_is_none_of_them() -> None:
    roots = {root_hash(salt, adapter) for salt in (None, "", "a", "b") for adapter in (None, "", "a", "b")}
    assert len(roots) == 16


def test_hashes_of_a_context_are_chained() -> None:
    first = chain_hash(root_hash("salt", None), [1, 2])
    assert chain_hashes([1, 2, 3, 4, 5], root_hash("salt", None), 2, 2) == [first, chain_hash(first, [3, 4])]
    assert chain_hashes([1], root_hash(None, None), 2, 0) == []
