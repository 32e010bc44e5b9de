"""The KV connector that vLLM loads into its engine core and its workers (`kv_connector_module_path`).

It holds that side's part (scheduler.py, worker.py) and gives vLLM's calls to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector
from vllm.forward_context import ForwardContext
from vllm.sampling_params import SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request, RequestStatus

from dynamo_local.engine.vllm.kv.pull.messages import Description, Pinned, PullCounts
from dynamo_local.engine.vllm.kv.pull.metadata import KeptStats, PullMetadata, ReadReport
from dynamo_local.engine.vllm.kv.pull.scheduler import PullScheduler
from dynamo_local.engine.vllm.kv.pull.worker import PullWorker
from dynamo_local.engine.vllm.kv.source import find_partial_block
from dynamo_local.engine.vllm.patches.kv import add_core_methods

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCoreProc


class PrefixPullConnector(NixlBaseConnector):
    """Connector of the engine core or of a worker, by `role`."""

    connector_scheduler: PullScheduler | None
    connector_worker: PullWorker | None

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            add_core_methods(METHODS)
            self.connector_scheduler = PullScheduler(vllm_config, self.engine_id, kv_cache_config)
        else:
            self.connector_worker = PullWorker(vllm_config, self.engine_id, kv_cache_config)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        assert self.connector_scheduler is not None
        self.connector_scheduler.bind_pool(gpu_block_pool)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        assert self.connector_worker is not None
        assert isinstance(self._connector_metadata, PullMetadata)
        self.connector_worker.start_load_kv(self._connector_metadata)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """vLLM's scheduler asks once for every step that has ended, and its workers likewise."""
        if self.connector_scheduler is None:
            return None
        return self.connector_scheduler.end_step()

    def build_connector_worker_meta(self) -> ReadReport | None:
        assert self.connector_worker is not None
        return self.connector_worker.take_report()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return KeptStats(data=data or {})


# Utility methods that prefix pull adds to vLLM's engine core.
#
# A utility call is run by the engine core's own loop, between two steps, and wakes it when it is idle: the only moment
# at which its block pool may be touched. The connector adds the methods when vLLM loads it into an engine core's
# process, forked or spawned.


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
