from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.ports import CacheChanges
from dynamo_local.engine.kv.cache_log import CacheLog


def hash_of(number: int) -> bytes:
    return bytes([number]) * 32


@given(st.lists(st.one_of(st.integers(0, 4), st.sampled_from(["take", "clear"])), max_size=40))
def test_what_is_taken_leads_from_one_state_to_the_next(story: list[int | str]) -> None:
    """Each number is a block that comes if it is not there, and goes otherwise."""
    log, cached, known = CacheLog(), set[bytes](), set[bytes]()

    def take() -> None:
        changes = log.take()
        assert log.take() is None
        if changes is None:
            assert known == cached
            return
        removed, stored = keys_in(changes.removed), keys_in(changes.stored)
        assert not removed & stored
        assert changes.cleared or (removed <= known and not stored & known)
        if changes.cleared:
            known.clear()
        known.difference_update(removed)
        known.update(stored)
        assert known == cached

    for event in story:
        match event:
            case "take":
                take()
            case "clear":
                log.cleared()
                cached.clear()
            case int():
                key = hash_of(event)[:8]
                (log.removed if key in cached else log.stored)(hash_of(event))
                cached ^= {key}
    take()


def keys_in(packed: bytes) -> set[bytes]:
    return {packed[start : start + 8] for start in range(0, len(packed), 8)}


def test_a_block_that_is_gone_again_is_not_told_of() -> None:
    log = CacheLog()
    log.stored(hash_of(1))
    log.stored(hash_of(2))
    log.removed(hash_of(1))
    assert log.take() == CacheChanges(stored=hash_of(2)[:8])
