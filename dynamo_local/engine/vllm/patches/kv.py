"""vLLM's block pool, prefix cache and NIXL connector, and methods that an engine core answers by beside vLLM's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dynamo_local.engine.kv.cache_log import CacheLog

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutputs


# Methods that an engine core answers by, beside vLLM's own, in its loop between two steps.


def core_method(name: str) -> str:
    """Return the name on vLLM's engine core of a method of ours."""
    return f"dynamo_local_{name}"


def add_core_methods(methods: Mapping[str, Callable[..., Any]]) -> None:
    """Set methods on the engine core's class, in this process and in those forked from it: vLLM looks utility methods
    up by name, and offers no registry."""
    from vllm.v1.engine.core import EngineCore

    for name, method in methods.items():
        setattr(EngineCore, core_method(name), method)


# Notice of every reference to a KV block that vLLM takes or gives up.
#
# The leases (engine/kv/leases.py) count the blocks that nothing but leases keeps. Without a notice they would have to
# look at all their blocks with every step.


def report_references(pool: BlockPool, changed: Callable[[Iterable[int]], None]) -> None:
    """Call `changed` with the ids of blocks whose count of references has changed, whoever has changed it."""
    # Through a name of no type: mypy sees no more than that methods are assigned.
    patched: Any = pool
    touch, free = patched.touch, patched.free_blocks

    def touch_and_report(blocks: Sequence[KVCacheBlock]) -> None:
        touch(blocks)
        changed(block.block_id for block in blocks)

    def free_and_report(ordered_blocks: Iterable[KVCacheBlock]) -> None:
        blocks = list(ordered_blocks)
        free(blocks)
        changed(block.block_id for block in blocks)

    patched.touch, patched.free_blocks = touch_and_report, free_and_report


# Notice of every block that enters or leaves vLLM's prefix cache (kv/cache_changes.py).


def note_blocks(pool: BlockPool, group: int, log: CacheLog, reset: Callable[[], None]) -> None:
    """Have `log` note the hashes in one KV cache group of a pool, those that are there already included. `reset` is
    called when vLLM has forgotten all of them."""
    # Through a name of no type: mypy sees no more than that a method is assigned.
    patched: Any = pool
    noting = _noting_map(group, log)
    forget_all = patched.reset_prefix_cache

    def forget_all_and_report() -> bool:
        forgotten: bool = forget_all()
        if forgotten:
            # vLLM has made another map.
            patched.cached_block_hash_to_block = noting(patched.cached_block_hash_to_block)
            reset()
        return forgotten

    patched.cached_block_hash_to_block = noting(patched.cached_block_hash_to_block)
    patched.reset_prefix_cache = forget_all_and_report


def send_with_steps(scheduler: Scheduler, add: Callable[[dict[int, EngineCoreOutputs]], None]) -> None:
    """Call `add` with what each step is about to send."""
    patched: Any = scheduler
    update = patched.update_from_output

    def update_and_add(*args: Any, **kwargs: Any) -> dict[int, EngineCoreOutputs]:
        outputs: dict[int, EngineCoreOutputs] = update(*args, **kwargs)
        add(outputs)
        return outputs

    patched.update_from_output = update_and_add


def _noting_map(group: int, log: CacheLog) -> Callable[[Any], Any]:
    """Returns what makes, of vLLM's map of cached blocks, one that notes the first and the last block of a hash."""
    from vllm.v1.core.block_pool import BlockHashToBlockMap
    from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, get_group_id

    class NotingMap(BlockHashToBlockMap):
        def __init__(self, former: BlockHashToBlockMap) -> None:
            self._cache = former._cache
            for key in self._cache:
                if get_group_id(key) == group:
                    log.stored(key)

        def insert(self, key: BlockHashWithGroupId, block: KVCacheBlock) -> None:
            if key not in self._cache and get_group_id(key) == group:
                log.stored(key)
            super().insert(key, block)

        def pop(self, key: BlockHashWithGroupId, block_id: int) -> KVCacheBlock | None:
            found = super().pop(key, block_id)
            if found is not None and key not in self._cache and get_group_id(key) == group:
                log.removed(key)
            return found

    return NotingMap


# Agents of our own in the place of NIXL's, for engines on a CPU (kv/agents.py).


@contextmanager
def replaced_agents(make: Callable[..., Any]) -> Iterator[None]:
    """Give connectors of vLLM that are made within what `make` returns of a name and NIXL's configuration."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker

    module: Any = base_worker
    original = module.NixlWrapper
    module.NixlWrapper = make
    try:
        yield
    finally:
        module.NixlWrapper = original
