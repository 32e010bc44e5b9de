"""KV that is not what belongs there shows, in tokens and in all KV that comes after it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.engine.mocker.blocks import BlockMemory, Filling, chain_hashes, fill, foreign_content, root_hash
from dynamo_local.engine.mocker.tokens import continuation

from .scheduling import VOCAB_SIZE, Watched, greedy, tiny

BLOCKS = (3, 0, 2, 1)
HASHES = tuple(chain_hashes(range(8), root_hash(None, None), 2, 4))


def test_blocks_hold_their_hashes_if_those_before_do() -> None:
    memory = BlockMemory(4)
    fill(memory, Filling(BLOCKS[:2], HASHES[:2], 0))
    fill(memory, Filling(BLOCKS, HASHES, 2))
    assert memory.read(BLOCKS) == list(HASHES)
    assert foreign_content(memory, BLOCKS, HASHES) is None


@given(st.integers(0, 3), st.integers(1, 4), st.binary(min_size=16, max_size=16))
def test_one_foreign_block_spoils_all_that_is_computed_from_it(spoilt: int, start: int, content: bytes) -> None:
    memory = BlockMemory(4)
    fill(memory, Filling(BLOCKS, HASHES, 0))
    memory.write(BLOCKS[spoilt], content)
    fill(memory, Filling(BLOCKS, HASHES, start))
    seen = memory.read(BLOCKS)
    if spoilt < start and content != HASHES[spoilt]:
        assert all(seen[index] != HASHES[index] for index in (spoilt, *range(start, 4)))
        assert foreign_content(memory, BLOCKS, HASHES) is not None
    elif spoilt >= start:
        assert seen == list(HASHES)


@given(st.integers(0, 4))
def test_a_block_written_by_somebody_else_gives_wrong_tokens(spoilt: int) -> None:
    watched = Watched(tiny(max_num_batched_tokens=32))
    sequence = watched.submit(list(range(20)), greedy(8))
    watched.step()
    watched.scheduler.memory.write(sequence.blocks[spoilt], b"somebody else's ")
    while watched.scheduler.has_work:
        watched.scheduler.complete(watched.scheduler.begin())
    tokens = sequence.tokens[20:]
    assert len(tokens) == 8
    assert tokens[:1] == continuation(range(20), 1, VOCAB_SIZE)
    assert tokens != continuation(range(20), 8, VOCAB_SIZE)


def test_who_finds_it_in_the_cache_gets_wrong_tokens_too() -> None:
    watched = Watched(tiny(kv_blocks=20, max_num_batched_tokens=32))
    first = watched.submit(list(range(20)), greedy(1))
    watched.step()
    watched.scheduler.memory.write(watched.scheduler.pool.match(first.hashes(2, 4))[1], b"somebody else's ")
    second = watched.submit([*range(20), 77], greedy(8))
    while watched.scheduler.has_work:
        watched.scheduler.complete(watched.scheduler.begin())
    assert second.cached_tokens == 20
    assert second.tokens[21:] != continuation(second.tokens[:21], 8, VOCAB_SIZE)
