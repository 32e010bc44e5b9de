"""Arguments of the pinned vLLM that change what a KV block holds: all are classified, so that a new one is noticed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import msgspec
from vllm.config import LoRAConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest

from dynamo_local.engine.vllm.kv import identity
from dynamo_local.engine.vllm.kv.identity import SETTLED, fingerprints, model_identity, why_not_lent
from dynamo_local.engine.vllm.kv.pull.messages import Description, why_not_told
from dynamo_local.engine.vllm.launch import _set_up_transfer
from dynamo_local.model.named.random_model import random_model

SETTLED_BY_THE_CORE = {"block_size", "prefix_caching_hash_algo", "tensor_parallel_size"}
"""See identity.identity_of."""

LEND_NOTHING = {
    "data_parallel_size", "decode_context_parallel_size", "enable_prefix_caching", "pipeline_parallel_size",
    "prefill_context_parallel_size", "spec_method", "spec_model", "spec_tokens", "speculative_config",
}  # fmt: skip
"""See identity.why_not_lent: with these, there is nothing to be compared."""

OF_ADAPTERS = {"enable_mixed_moe_lora_format", "enable_moe_shared_loras", "lora_dtype", "lora_target_modules"}
"""Settings in the fingerprints of adapters."""

MATTER_NOT: Mapping[str, set[str]] = {
    "room, and how many requests share it": {
        "cpu_offload_gb", "cpu_offload_params", "gpu_memory_utilization", "kv_cache_memory_bytes",
        "long_prefill_token_threshold", "long_prefill_token_threshold_adaptive", "max_num_active_seqs",
        "max_num_batched_tokens", "max_num_queued_reqs", "max_num_queued_tokens", "max_num_scheduled_tokens",
        "max_num_seqs", "num_gpu_blocks_override", "offload_backend", "offload_group_size", "offload_num_in_group",
        "offload_params", "offload_prefetch_step", "watermark",
    },
    "when and in what order requests are computed": {
        "async_scheduling", "enable_chunked_prefill", "prefill_schedule_interval", "scheduler_cls",
        "scheduler_reserve_full_isl", "scheduling_policy", "stream_interval",
    },
    "rounds otherwise at most, as another batch does": {
        "all2all_backend", "compilation_config", "cudagraph_capture_sizes", "dbo_decode_token_threshold",
        "dbo_prefill_token_threshold", "disable_cascade_attn", "disable_custom_all_reduce",
        "enable_batch_sharded_sampling", "enable_dbo", "enable_ep_weight_filter", "enable_eplb",
        "enable_expert_parallel", "enable_flashinfer_autotune", "enable_hc_sp", "enforce_eager", "eplb_config",
        "expert_placement_strategy", "ir_op_priority", "kernel_config", "linear_backend", "max_cudagraph_capture_size",
        "moe_backend", "optimization_level", "performance_mode", "sparse_indexer_topk_backend", "ubatch_size",
    },
    "where processes run, and how they talk": {
        "_api_process_count", "_api_process_rank", "cpu_distributed_timeout_seconds", "device_ids",
        "disable_nccl_for_dp_synchronization", "distributed_executor_backend", "distributed_timeout_seconds",
        "enable_fault_tolerance", "enable_nccl_comm_suspend", "enable_shm_tensor_arena", "fail_on_environ_validation",
        "fault_tolerance_config", "master_addr", "master_port", "max_parallel_loading_workers", "nnodes", "node_rank",
        "numa_bind", "numa_bind_cpus", "numa_bind_nodes", "ray_workers_use_nsight", "shutdown_timeout",
    },
    "of data and context parallelism, with which nothing is lent": {
        "cp_kv_cache_interleave_size", "data_parallel_address", "data_parallel_backend", "data_parallel_external_lb",
        "data_parallel_hybrid_lb", "data_parallel_multi_port_external_lb", "data_parallel_rank",
        "data_parallel_rpc_port", "data_parallel_size_local", "data_parallel_start_rank", "dcp_comm_backend",
        "dcp_kv_cache_interleave_size", "dcp_q_replicate", "dp_sync_interval", "elastic_ep_max_dp_size",
        "enable_elastic_ep",
    },
    "of models with states or sliding windows, of which nothing is lent": {
        "enable_mamba_cache_stochastic_rounding", "enable_mamba_shared_prefix_checkpoint", "gdn_prefill_backend",
        "kda_decode_backend", "kda_prefill_backend", "mamba_backend", "mamba_block_size", "mamba_cache_dtype",
        "mamba_cache_mode", "mamba_cache_philox_rounds", "mamba_config", "mamba_ssm_cache_dtype", "mamba_ssu_algorithm",
        "replayssm_buffer_len", "swa_bounded_replay", "use_replayssm",
    },
    "the shape of blocks, which the engine core tells of as it is": {"disable_hybrid_kv_cache_manager"},
    "which blocks are kept for how long, and found by whom": {
        "ec_manager_config", "ec_transfer_config", "kv_events_config", "kv_offloading_backend", "kv_offloading_size",
        "kv_transfer_config", "prefix_cache_retention_interval", "prefix_match_unit",
    },
    "what becomes of the model's output": {
        "aux_output_config", "enable_return_routed_experts", "enable_trace_replay", "generation_config",
        "logits_processors", "logprobs_mode", "max_logprobs", "override_generation_config", "pooler_config",
        "reasoning_config", "reasoning_parser", "reasoning_parser_plugin", "return_sampling_mask", "seed",
        "structured_outputs_config", "use_fp64_gumbel", "watermark_config",
    },
    "how prompts become tokens, before workers see them": {
        "enable_prompt_embeds", "hf_token", "io_processor_plugin", "renderer_num_workers", "skip_tokenizer_init",
        "tokenizer", "tokenizer_mode", "tokenizer_revision", "tokens_only",
    },
    "of images, sounds and videos, which are refused": {
        "allowed_local_media_path", "allowed_media_domains", "default_mm_loras", "disable_chunked_mm_input",
        "enable_mm_embeds", "enable_tower_connector_lora", "interleave_mm_strings", "language_model_only",
        "limit_mm_per_prompt", "media_io_kwargs", "mm_device_do_normalize", "mm_encoder_attn_backend",
        "mm_encoder_attn_dtype", "mm_encoder_fp8_scale_path", "mm_encoder_fp8_scale_save_margin",
        "mm_encoder_fp8_scale_save_path", "mm_encoder_only", "mm_encoder_tp_mode", "mm_hasher_algorithm",
        "mm_ipc_gpu_memory_gb", "mm_processor_cache_gb", "mm_processor_cache_type", "mm_processor_device",
        "mm_processor_kwargs", "mm_shm_cache_max_object_size_mb", "mm_tensor_ipc", "skip_mm_profiling",
        "video_pruning_method", "video_pruning_rate",
    },
    "how files come to memory; which ones, their names, sizes and times tell": {
        "allow_deprecated_quantization", "download_dir", "pt_load_map_location", "safetensors_load_strategy",
        "safetensors_prefetch_block_size", "safetensors_prefetch_num_threads", "use_tqdm_on_load",
    },
    "of weights that change or leave while an engine runs, for which there is no way to ask ours": {
        "enable_cumem_allocator", "enable_sleep_mode", "sleep_mode_offload_cudagraph", "sleep_preserve_parameter_names",
        "weight_transfer_config",
    },
    "room for adapters; which one a request has is in its blocks' hashes": {
        "enable_lora", "fully_sharded_loras", "max_cpu_loras", "max_lora_cls_labels", "max_lora_rank", "max_loras",
        "specialize_active_lora",
    },
    "names, logs and figures": {
        "aggregate_engine_logging", "collect_detailed_traces", "cudagraph_metrics", "custom_histogram_buckets",
        "disable_log_stats", "enable_layerwise_nvtx_tracing", "enable_log_requests", "enable_logging_iteration_details",
        "enable_mfu_metrics", "enable_mm_processor_stats", "jit_monitor_mode", "jit_monitor_verbose",
        "kv_cache_metrics", "kv_cache_metrics_sample", "log_config_file", "log_level", "logging_config",
        "otlp_traces_endpoint", "per_request_spec_decode_metrics", "profiler_config", "served_model_name",
        "show_hidden_metrics_for_version",
    },
}  # fmt: skip


def test_of_each_argument_it_is_known_whether_it_matters() -> None:
    groups = [set(SETTLED), SETTLED_BY_THE_CORE, LEND_NOTHING, OF_ADAPTERS, *MATTER_NOT.values()]
    known = [name for group in groups for name in group]
    assert len(known) == len(set(known)), "each is in one group"
    assert set(known) == {field.name for field in dataclasses.fields(AsyncEngineArgs)}


def test_of_each_setting_for_adapters_it_is_known_whether_it_matters() -> None:
    arguments = OF_ADAPTERS | {name for group in MATTER_NOT.values() for name in group}
    renamed = {"target_modules": "lora_target_modules"}
    assert {renamed.get(field.name, field.name) for field in dataclasses.fields(LoRAConfig)} <= arguments


def config_of(**arguments: Any) -> VllmConfig:
    given = {"model": str(random_model()), "max_model_len": 512, **arguments}
    return AsyncEngineArgs(**given).create_engine_config()


def print_of(vllm_config: VllmConfig) -> str:
    return fingerprints({}, model_identity(vllm_config), None, ())[None]


@pytest.mark.parametrize(("weights", "has_files"), [("", False), ("s3://bucket/model", True)])
def test_between_machines_weights_whose_files_cannot_be_read_are_the_same_on_one_machine_alone(
    monkeypatch: pytest.MonkeyPatch, weights: str, has_files: bool
) -> None:
    """Another machine may fetch other weights by the same name."""
    vllm_config = config_of()
    vllm_config.model_config.model_weights = weights
    if not has_files:
        monkeypatch.setattr(identity, "model_folder", lambda _: None)
    here = model_identity(vllm_config, "10.1.2.0/24")
    assert model_identity(vllm_config, "10.1.2.0/24") == here
    monkeypatch.setattr(identity, "machine_id", lambda: "another")
    assert model_identity(vllm_config, "10.1.2.0/24") != here


def test_between_machines_two_commits_of_a_model_differ_before_their_weights_are_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = []
    for commit in ("a1", "b2"):
        folder = tmp_path / commit
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        monkeypatch.setattr(identity, "model_folder", lambda _, folder=folder: folder)
        found.append(model_identity(config_of(), "10.1.2.0/24")["files"])
    assert found[0] != found[1]


@pytest.mark.parametrize("path", sorted(set(SETTLED.values())))
def test_what_matters_is_in_the_fingerprint(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    vllm_config = config_of()
    before = print_of(vllm_config)
    parent, _, name = path.rpartition(".")
    of: Any = attrgetter(parent)(vllm_config) if parent else vllm_config
    if path == "model_config.hf_config":
        of, name = of.hf_config, "rope_parameters"
    object.__setattr__(of, name, "changed")
    assert print_of(vllm_config) != before


@pytest.mark.parametrize(
    ("arguments", "matters"),
    [
        ({"max_model_len": 1024}, True),
        ({"dtype": "float32"}, True),
        ({"kv_cache_dtype": "fp8_e5m2"}, True),
        ({"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}}, True),
        ({"load_format": "dummy"}, True),
        ({"attention_config": {"use_prefill_query_quantization": True}}, True),
        ({"additional_config": {"a": 1}}, True),
        ({"max_num_seqs": 3, "max_num_batched_tokens": 600, "seed": 5, "enforce_eager": True}, False),
        ({"served_model_name": "other", "tokenizer_mode": "slow", "enable_chunked_prefill": False}, False),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_change_the_fingerprint_if_they_change_the_kv(arguments: dict[str, Any], matters: bool) -> None:
    assert (print_of(config_of(**arguments)) != print_of(config_of())) is matters


def test_a_length_that_shrinks_to_the_memory_there_is_changes_nothing() -> None:
    """`max-model-len` is settled after the model has been built, by what each engine has: they lend to each other."""
    made: list[VllmConfig] = []

    def configuration(_: Any = None) -> VllmConfig:
        made.append(config_of(max_model_len=-1))
        return made[-1]

    identities = []
    for length in (256, 128):
        vllm_config, identity, why = _set_up_transfer(configuration, wanted=True)
        assert why is None
        vllm_config.model_config.max_model_len = length
        identities.append(identity)
    assert identities[0] == identities[1]


@pytest.mark.parametrize(
    ("name", "value"),
    [("target_modules", ["q_proj"]), ("enable_moe_shared_loras", True), ("enable_mixed_moe_lora_format", True)],
)
def test_what_adapters_are_made_of_changes_their_fingerprints_only(tmp_path: Path, name: str, value: Any) -> None:
    def prints(config: LoRAConfig, three_dimensional: bool = False) -> dict[str | None, str]:
        adapter = LoRARequest("pirate", 1, str(tmp_path), is_3d_lora_weight=three_dimensional)
        return fingerprints({}, {}, config, [adapter])

    plain, changed = prints(LoRAConfig()), prints(LoRAConfig(**{name: value}))
    assert plain[None] == changed[None]
    assert plain["pirate"] != changed["pirate"]
    assert plain["pirate"] != prints(LoRAConfig(), three_dimensional=True)["pirate"]


def changed(change: Callable[[Any], None]) -> VllmConfig:
    vllm_config = config_of()
    change(vllm_config)
    return vllm_config


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda config: vars(config.model_config).update(is_encoder_decoder=True), "encoder"),
        (lambda config: setattr(config.cache_config, "enable_prefix_caching", False), "prefix caching"),
        (lambda config: setattr(config, "speculative_config", object()), "speculative"),
        (lambda config: setattr(config.parallel_config, "pipeline_parallel_size", 2), "split"),
        (lambda config: setattr(config.parallel_config, "prefill_context_parallel_size", 2), "split"),
    ],
)
def test_what_cannot_lend_is_known_before_the_engine_starts(change: Callable[[Any], None], why: str) -> None:
    assert why_not_lent(config_of()) is None
    found = why_not_lent(changed(change))
    assert found is not None
    assert why in found


@pytest.mark.parametrize(
    ("agents", "fits"),
    [
        ((), True),
        ((b"a" * 65_536,) * 4, True),
        ((b"a" * 65_537,), False),
        ((b"a" * 65_536,) * 4 + (b"a",), False),
        ((b"a",) * 64, True),
        ((b"a",) * 65, False),
    ],
)
def test_metadata_that_is_too_long_is_known_before_it_is_told(agents: tuple[bytes, ...], fits: bool) -> None:
    assert (why_not_told(agents) is None) is fits
    description = Description("e", agents if fits else (), {}, 32, 1)
    assert msgspec.convert(msgspec.to_builtins(description, builtin_types=(bytes,)), Description) == description
