"""The KV connector that vLLM loads into its engine core and its workers (`kv_connector_module_path`).

It holds that side's part (scheduler.py, worker.py) and gives vLLM's calls to it.
"""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector
from vllm.forward_context import ForwardContext
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_cache_interface import KVCacheConfig

from dynamo_local.engine.vllm.kv.core_methods import METHODS
from dynamo_local.engine.vllm.kv.pull.metadata import KeptStats, PullMetadata, ReadReport
from dynamo_local.engine.vllm.kv.pull.scheduler import PullScheduler
from dynamo_local.engine.vllm.kv.pull.worker import PullWorker
from dynamo_local.engine.vllm.patches.kv import add_core_methods


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
