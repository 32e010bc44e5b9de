"""Changes of vLLM's prefix cache: which blocks come and go, told to the worker's host with the steps.

vLLM's own KV events are not used. They leave an engine core through a socket for one publisher, at a port that
everybody reaches unless told otherwise; each tells the tokens of its blocks; and of a block that is cached twice they
tell twice. Here the map in which vLLM looks for cached blocks notes its own first and last entry of a hash. What it has
noted goes along with the outputs of the step, as eight bytes for a block: no socket, and no event for a copy.
`kv-events-config` goes on to work beside it.

vLLM enters a block in the map when it schedules the computation, and requests find it from then on. A reset comes
between two steps; it is told at once, in a message of its own.

Of a model with layers of several kinds, the blocks of full attention are told of. vLLM may find less of a prefix then,
where blocks of other layers have gone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dynamo_local.core.ports import CacheChanges
from dynamo_local.engine.kv.cache_log import CacheLog
from dynamo_local.engine.vllm.patches.kv import add_core_methods, core_method, note_blocks, send_with_steps
from dynamo_local.engine.vllm.patches.table import applies, why_not

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.metrics.stats import SchedulerStats

PATCH = "changes of the prefix cache"
"""Name in the table of patches."""

_METHOD = "tell_cache"

_KEY = "dynamo_local_cache"
"""Where changes are in a step's statistics: among those of a connector for encoders, which nobody reads here."""


def let_engines_tell_of_caches() -> None:
    """Add the method to vLLM's engine core, in this process and in those forked from it."""
    if applies(PATCH):
        add_core_methods({_METHOD: tell_cache})


async def ask_for_changes(core: Any) -> str | None:
    """Have an engine core tell of its cache from now on. `core` is vLLM's client of it, which has just started.

    Returns the reason why it cannot; None if it does.
    """
    unlike = why_not(PATCH)
    if unlike is not None:
        return f"this version of vLLM is not known to tell of it: {unlike}"
    refused: str | None = await core.call_utility_async(core_method(_METHOD))
    return refused


def tell_cache(core: EngineCoreProc) -> str | None:
    """Begin to tell. Returns why this is not possible, or None. Runs in the engine core, between two steps."""
    scheduler: Any = core.scheduler
    manager = scheduler.kv_cache_manager
    if not manager.enable_caching:
        return "prefix caching is off"
    group = _full_attention(manager.coordinator, core.vllm_config.cache_config.block_size)
    if group is None:
        return "the model has no layers of full attention with blocks of the size that it is announced with"
    log = CacheLog()

    def reset() -> None:
        log.cleared()
        _send_now(core, log)

    note_blocks(manager.block_pool, group, log, reset)
    send_with_steps(scheduler, lambda outputs: _add(outputs, log))
    return None


def changes_of(stats: SchedulerStats | None) -> CacheChanges | None:
    """The changes that a step has brought."""
    if stats is None or not stats.ec_connector_stats or _KEY not in stats.ec_connector_stats:
        return None
    cleared, removed, stored = stats.ec_connector_stats[_KEY]
    return CacheChanges(removed, stored, cleared)


def _full_attention(coordinator: Any, block_size: int) -> int | None:
    """Number of the KV cache group whose blocks are told of. `block_size` is that of the hashes outside."""
    from vllm.v1.kv_cache_interface import is_full_attention_spec

    pool = coordinator.block_pool
    for number, manager in enumerate(coordinator.single_type_managers):
        same = manager.block_pool is pool and pool.hash_block_size == manager.block_size == block_size
        if same and is_full_attention_spec(manager.kv_cache_spec):
            return number
    return None


def _add(outputs: dict[int, EngineCoreOutputs], log: CacheLog) -> None:
    """Add what has changed to what a step sends, where it has statistics."""
    with_stats = next((each for each in outputs.values() if each.scheduler_stats is not None), None)
    if with_stats is not None and with_stats.scheduler_stats is not None:
        _put(with_stats.scheduler_stats, log)


def _send_now(core: EngineCoreProc, log: CacheLog) -> None:
    """Send what has changed, without a step."""
    from vllm.v1.engine import EngineCoreOutputs

    stats = core.scheduler.make_stats()
    if stats is not None:
        _put(stats, log)
        core.output_queue.put_nowait((0, EngineCoreOutputs(scheduler_stats=stats)))


def _put(stats: SchedulerStats, log: CacheLog) -> None:
    changes = log.take()
    if changes is not None:
        packed = (changes.cleared, changes.removed, changes.stored)
        stats.ec_connector_stats = {**(stats.ec_connector_stats or {}), _KEY: packed}
