"""Utility methods that prefix pull adds to vLLM's engine core.

A utility call is run by the engine core's own loop, between two steps, and wakes it when it is idle: the only moment
at which its block pool may be touched. The connector adds the methods when vLLM loads it into an engine core's process,
forked or spawned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import msgspec

from dynamo_local.engine.vllm.kv.pull.messages import Description, Pinned, PullCounts
from dynamo_local.engine.vllm.kv.source import find_partial_block

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCoreProc

    from dynamo_local.engine.vllm.kv.pull.scheduler import PullScheduler


def describe(core: EngineCoreProc) -> Description:
    return _scheduler(core).describe()


def cached(core: EngineCoreProc, hashes: Sequence[bytes]) -> int:
    """Count the leading hashes that are cached."""
    return len(_scheduler(core).source.cached(hashes))


def pin(core: EngineCoreProc, name: str, hashes: Sequence[bytes], until: float, rest: Sequence[int]) -> Future[Pinned]:
    scheduler: Any = core.scheduler
    part = _scheduler(core)
    answer = part.source.pin(name, hashes, until, find_partial_block(scheduler, part.block_size, hashes, rest))
    _tell_load(core)
    return answer


def release(core: EngineCoreProc, pins: Sequence[str], holds: Sequence[str]) -> float | None:
    """End these leases, and all that are over. Returns when the next one will be, if there are any."""
    source = _scheduler(core).source
    source.release(pins, holds)
    _tell_load(core)
    next_end = source.leases.next_end
    return None if math.isinf(next_end) else next_end


def confirm(core: EngineCoreProc, name: str) -> bool:
    held = _scheduler(core).source.confirm(name)
    _tell_load(core)
    return held


def read_ended(core: EngineCoreProc, name: str) -> Future[bool]:
    return _scheduler(core).confirmations.ended(name)


def settle_read(core: EngineCoreProc, name: str, held: bool) -> None:
    _scheduler(core).confirmations.settle(name, held)


def grow(
    core: EngineCoreProc,
    name: str,
    computed: int,
    rest: Sequence[int],
    sampling: bytes,
    arrival_time: float,
    stays: bool,
) -> bool:
    """Continue a request that waits for input, and has the KV of `computed` tokens, with `rest`; then it waits again,
    or is over. False: there is no such request. (vLLM would take `rest` for a request of its own.)"""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request, RequestStatus

    scheduler: Any = core.scheduler
    waiting = scheduler.requests.get(name)
    if waiting is None or waiting.status != RequestStatus.WAITING_FOR_STREAMING_REQ:
        return False
    if waiting.num_computed_tokens != computed or not rest:
        return False
    params = msgspec.msgpack.decode(sampling, type=SamplingParams)
    scheduler.add_request(Request(name, list(rest), params, None, arrival_time=arrival_time, resumable=True))
    if not stays:
        # The end of its input.
        scheduler.add_request(Request(name, [0], params, None, resumable=False))
    return True


def counts(core: EngineCoreProc) -> PullCounts:
    return _scheduler(core).counts()


def _scheduler(core: EngineCoreProc) -> PullScheduler:
    connector: Any = core.scheduler.get_kv_connector()
    part: PullScheduler = connector.connector_scheduler
    return part


def _tell_load(core: EngineCoreProc) -> None:
    """Send the load to the worker's host, which otherwise comes with steps only."""
    from vllm.v1.engine import EngineCoreOutputs

    scheduler: Any = core.scheduler
    if scheduler.has_requests():
        return
    stats = scheduler.make_stats(kv_connector_stats=_scheduler(core).stats())
    if stats is not None:
        core.output_queue.put_nowait((0, EngineCoreOutputs(scheduler_stats=stats)))


METHODS: Mapping[str, Callable[..., Any]] = {
    method.__name__: method
    for method in (describe, cached, pin, release, grow, counts, confirm, read_ended, settle_read)
}
