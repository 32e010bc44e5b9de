"""What an engine that has started tells of itself."""

from __future__ import annotations

from typing import Any

from dynamo_local.core.messages.presence import EngineInfo
from dynamo_local.engine.vllm.kv.pull.host import PullHost


def info_of(
    vllm_config: Any,
    pull: PullHost | None,
    no_transfer: str | None,
    tasks: tuple[str, ...],
    *,
    kv_events: bool,
    kv_network: str = "",
) -> EngineInfo:
    """Describe the engine that has started: vLLM's client has written its own figures into the configuration."""
    from dynamo_local.engine.vllm.requests.seeded_sampling import forgotten

    return EngineInfo(
        engine="vllm",
        model=vllm_config.model_config.served_model_name,
        max_model_len=vllm_config.model_config.max_model_len,
        block_size=vllm_config.cache_config.block_size,
        kv_blocks=vllm_config.cache_config.num_gpu_blocks,
        max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
        no_transfer=no_transfer,
        forgotten=forgotten(vllm_config),
        block_bytes=None if pull is None else pull.block_bytes,
        tasks=tasks,
        kv_events=kv_events,
        kv_network=kv_network if no_transfer is None else "",
    )
