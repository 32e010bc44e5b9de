"""Parking of an engine: its KV cache is emptied, and its memory given back to the system.

What is refused and done is decided in the engine core's own loop, between two steps, by utility calls: no request and
no reader can come in between. On a CPU the worker processes give back the pages of their KV caches, which come again
with the first use of each block. On GPUs this is vLLM's sleep level 1, and the engine core takes no requests until it
is woken.

Before anything else the prefix cache is emptied: its hashes would stand for blocks of zeros. Other engines read blocks
only while they are pinned, and with pins there is no parking. So KV that others read needs no other treatment on a CPU,
where nothing is registered (kv/agents.py). On GPUs it is registered with NIXL, and an engine that lends KV is not
parked; nor is one with a KV connector of its own, which may have registered its memory anywhere.
"""

from __future__ import annotations

import asyncio
import ctypes
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Literal

from dynamo_local.core.errors import EngineError, one_line
from dynamo_local.engine.vllm.patches.kv import add_core_methods, core_method
from dynamo_local.engine.vllm.patches.table import applies, why_not

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

PATCH = "parking"
"""Name in the table of patches."""

Order = Literal["park", "wake"]


def let_engines_park() -> None:
    """Add the methods to vLLM's engine core, in this process and in those forked from it."""
    if applies(PATCH):
        add_core_methods({"park": park_core, "wake": wake_core})


async def tell(core: Any, order: Order, deadline_s: float) -> None:
    """Have an engine core park or wake. `core` is vLLM's client of it.

    Raises EngineError if it refuses, fails or does not answer within `deadline_s`.
    """
    if (unlike := why_not(PATCH)) is not None:
        raise EngineError(f"this version of vLLM cannot be parked: {unlike}")
    try:
        async with asyncio.timeout(deadline_s):
            refused: str | None = await core.call_utility_async(core_method(order))
    except TimeoutError as error:
        raise EngineError(f"the engine has not done it within {deadline_s:g} s ({order})") from error
    except Exception as error:
        # vLLM raises all sorts of errors for calls that fail.
        raise EngineError(f"the engine has failed to {order}: {one_line(error)}") from error
    if refused is not None:
        raise EngineError(refused)


def park_core(core: EngineCore) -> str | Future[None] | None:
    """Park. Returns why this is refused, or None, or the Future of the latter. Runs in the engine core."""
    refused = _refusal(core)
    if refused is not None:
        return refused
    if not _on_cpu():
        sleeping: Future[None] | None = core.sleep(1)
        return sleeping
    if not core.reset_prefix_cache():
        return "blocks of its KV cache are in use"
    core.model_executor.collective_rpc(give_back)
    trim_heap()
    return None


def wake_core(core: EngineCore) -> str | None:
    """Take requests again. Returns why this has failed, or None. Runs in the engine core."""
    if core.model_executor.is_sleeping and not core.wake_up():
        return "the engine's memory has not come back"
    if core.is_scheduler_paused():
        core.resume_scheduler()
    return None


def give_back(worker: object) -> None:
    """Give the KV cache's pages back to the system, and those that the heap does not use. Runs in each worker process,
    on a CPU."""
    from dynamo_local.engine.vllm.patches.tuning import give_back_kv

    give_back_kv()
    trim_heap()


def trim_heap() -> None:
    """Give free memory of the C library's heap back to the system, where the library can do that (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _refusal(core: EngineCore) -> str | None:
    scheduler: Any = core.scheduler
    if scheduler.requests or core.batch_queue:
        return "the engine has requests"
    connector = scheduler.get_kv_connector()
    if connector is None:
        return None
    from dynamo_local.engine.vllm.kv.pull.scheduler import PullScheduler

    ours = getattr(connector, "connector_scheduler", None)
    if not isinstance(ours, PullScheduler):
        return "its KV cache belongs to a KV connector of its own (kv-transfer-config)"
    if not _on_cpu():
        return "on GPUs, the memory of KV that other engines read stays where it is (kv-transfer)"
    return ours.why_kept()


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())
