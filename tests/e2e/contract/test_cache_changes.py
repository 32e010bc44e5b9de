"""What is told of vLLM's prefix cache is what vLLM finds in it. The pool is vLLM's own; there is no engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_block_hash, get_group_id
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.core import EngineCore
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from dynamo_local.core.ports import CacheChanges
from dynamo_local.core.routing.caches.index import key_of
from dynamo_local.core.routing.caches.mirror import CacheMirror
from dynamo_local.engine.kv.cache_log import CacheLog
from dynamo_local.engine.vllm.kv import cache_changes
from dynamo_local.engine.vllm.patches.kv import core_method, note_blocks, send_with_steps
from dynamo_local.engine.vllm.patches.table import why_not

BLOCK = 16


class Caching:
    """A pool, requests of one context that use it (so that a block is there more than once), and what is told."""

    def __init__(self, *, told_from_the_start: bool) -> None:
        self.pool = BlockPool(num_gpu_blocks=9, enable_caching=True, hash_block_size=BLOCK)
        self.log = CacheLog()
        self.mirror = CacheMirror("w")
        self._held: list[list[KVCacheBlock]] = []
        if told_from_the_start:
            self.tell()

    def tell(self) -> None:
        note_blocks(self.pool, 0, self.log, self.log.cleared)

    def cache(self, context: int, count: int, group: int = 0) -> None:
        if count > self.pool.get_num_free_blocks():
            return
        blocks = self.pool.get_new_blocks(count)
        # Blocks of all contexts are alike up to the second one.
        hashes = [bytes([context if index > 1 else 0, index]) * 16 for index in range(count)]
        request: Any = SimpleNamespace(block_hashes=hashes)
        self.pool.cache_full_blocks(request, blocks, 0, count, BLOCK, group)
        self._held.append(blocks)

    def free(self) -> None:
        if self._held:
            self.pool.free_blocks(self._held.pop(0))

    def reset(self) -> None:
        self.pool.reset_prefix_cache()

    def told(self) -> set[int]:
        if (changes := self.log.take()) is not None:
            self.mirror.apply(changes)
        return self.mirror.keys()

    def cached(self) -> set[int]:
        hashes = {block.block_hash for block in self.pool.blocks if block.block_hash is not None}
        found = {each for each in hashes if self.pool.get_cached_block(get_block_hash(each), [get_group_id(each)])}
        assert found == hashes
        return {key_of(each) for each in found if get_group_id(each) == 0}


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("cache"), st.integers(0, 2), st.integers(1, 5), st.sampled_from([0, 0, 1])),
        st.tuples(st.sampled_from(["free", "free", "reset", "tell"])),
    ),
    max_size=30,
)


@settings(deadline=None, max_examples=200)
@given(steps=STEPS, told_from_the_start=st.booleans())
def test_what_is_told_is_what_the_pool_has_cached(steps: list[tuple[Any, ...]], told_from_the_start: bool) -> None:
    caching = Caching(told_from_the_start=told_from_the_start)
    telling = told_from_the_start
    for name, *arguments in steps:
        if name == "tell":
            if not telling:
                caching.tell()
                telling = True
        else:
            getattr(caching, name)(*arguments)
        if telling:
            assert caching.told() == caching.cached()


def test_the_engine_core_has_the_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineCore, core_method("tell_cache"), None, raising=False)
    assert why_not(cache_changes.PATCH) is None
    cache_changes.let_engines_tell_of_caches()
    assert getattr(EngineCore, core_method("tell_cache")) is cache_changes.tell_cache


def test_changes_travel_with_the_outputs_of_a_step() -> None:
    log = CacheLog()
    stats = SchedulerStats(ec_connector_stats={"others": 1})
    sent = [{}, {0: EngineCoreOutputs()}, {0: EngineCoreOutputs(scheduler_stats=stats)}]
    scheduler: Any = SimpleNamespace(update_from_output=lambda _, number: sent[number])
    send_with_steps(scheduler, lambda outputs: cache_changes._add(outputs, log))
    log.stored(b"12345678-and-more")
    # What a step without statistics cannot take goes with the next.
    for number in range(2):
        assert scheduler.update_from_output(None, number) == sent[number]
    outputs = scheduler.update_from_output(None, number=2)[0]
    received = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(outputs))
    assert cache_changes.changes_of(received.scheduler_stats) == CacheChanges(stored=b"12345678")
    assert received.scheduler_stats.ec_connector_stats["others"] == 1
    assert cache_changes.changes_of(SchedulerStats()) is None
    assert cache_changes.changes_of(None) is None
