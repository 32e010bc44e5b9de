"""Identity of KV: everything that a block's bytes depend on, and the hashes by which blocks are found. Engines of the
same identity may read each other's KV. Imports vLLM."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path

from transformers import PretrainedConfig
from vllm.config import CacheConfig, LoRAConfig, ModelConfig, VllmConfig
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, MLAAttentionSpec
from vllm.v1.request import Request
from vllm.version import __version__  # type: ignore[attr-defined]

from dynamo_local.model.weights import contents_identity, files_identity
from state.machine.identity import machine_id

# Identity of KV: everything that a block's bytes depend on. Engines of the same identity may read each other's KV.
#
# One machine, one clock, one file system: files that look the same from outside (name, size, time) are taken for the
# same. That is cheap, and errs on the side of computing. Where KV is read between machines the files' contents are
# compared: copies and images give other files the same size and time.

_KINDS = (FullAttentionSpec, MLAAttentionSpec)
"""Kinds of attention whose blocks hold the KV of all their tokens, for all layers."""

SETTLED: Mapping[str, str] = {
    "additional_config": "additional_config",
    "attention_backend": "attention_config",
    "attention_config": "attention_config",
    "code_revision": "model_config.code_revision",
    "config_format": "model_config.config_format",
    "convert": "model_config.convert_type",
    "diffusion_config": "diffusion_config",
    "disable_sliding_window": "model_config.disable_sliding_window",
    "dtype": "model_config.dtype",
    "engram_config": "engram_config",
    "hf_config_path": "model_config.hf_config",
    "hf_overrides": "model_config.hf_config",
    "ignore_patterns": "load_config.ignore_patterns",
    "kv_cache_dtype": "cache_config.cache_dtype",
    "kv_cache_dtype_skip_layers": "cache_config.kv_cache_dtype_skip_layers",
    "kv_sharing_fast_prefill": "cache_config.kv_sharing_fast_prefill",
    "load_format": "load_config.load_format",
    # Which factors a long rope has depends on it, and how some models scale their attention.
    "max_model_len": "model_config.max_model_len",
    "model": "model_config.model",
    "model_class_overrides": "model_config.model_class_overrides",
    "model_impl": "model_config.model_impl",
    "model_loader_extra_config": "load_config.model_loader_extra_config",
    "model_weights": "model_config.model_weights",
    "quantization": "model_config.quantization",
    "quantization_config": "model_config.quantization_config",
    "revision": "model_config.revision",
    "runner": "model_config.runner_type",
    "trust_remote_code": "model_config.trust_remote_code",
    "worker_cls": "parallel_config.worker_cls",
    "worker_extension_cls": "parallel_config.worker_extension_cls",
}
"""vLLM's arguments (fields of its AsyncEngineArgs) that change what a block holds, and where in vLLM's configuration
they end up. Those that the engine core settles are in `identity_of`, and why all others change nothing is in the test
that goes through them (tests/e2e/contract/test_identity.py)."""

_SETTLED_FOR_ADAPTERS = ("lora_dtype", "target_modules", "enable_mixed_moe_lora_format", "enable_moe_shared_loras")
"""The same of vLLM's LoRAConfig."""


def why_not_lent(vllm_config: VllmConfig) -> str | None:
    """Say why blocks of such an engine cannot be read one by one, as far as its configuration tells. With a KV
    connector, vLLM would not even start some of these."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if model.is_encoder_decoder:
        return "the model has an encoder, whose part of the KV no prefix stands for"
    if model.has_inner_state or model.attn_type == "attention_free":
        return "the model keeps a state beside its KV, or instead (Mamba, linear attention, convolutions)"
    if not vllm_config.cache_config.enable_prefix_caching:
        return "prefix caching is off"
    if vllm_config.speculative_config is not None:
        return "speculative decoding is on"
    sizes = (
        parallel.pipeline_parallel_size,
        parallel.prefill_context_parallel_size,
        parallel.decode_context_parallel_size,
        parallel.data_parallel_size,
    )
    return None if set(sizes) == {1} else "the model is split other than by tensor parallelism"


def unsupported_layers(kv_cache_config: KVCacheConfig) -> str | None:
    """Say why blocks of an engine with these layers cannot be read one by one; None if they can."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1 or type(groups[0].kv_cache_spec) not in _KINDS:
        return "the model has layers other than full attention"
    return None


def identity_of(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> dict[str, str]:
    """Identity as the engine core's process knows it, where everything has been settled."""
    cache = vllm_config.cache_config
    return {
        "vllm": __version__,
        "block size": str(cache.block_size),
        "layout": cache.get_resolved_kv_cache_layout().name,
        "cache dtype": str(cache.cache_dtype),
        "attention": ", ".join(str(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups),
        "ranks": str(vllm_config.parallel_config.tensor_parallel_size),
        "hash": cache.prefix_caching_hash_algo,
        # Random where the hash is not cryptographic: then no two engines agree.
        "first hash": kv_cache_utils.NONE_HASH.hex(),
    }


def model_identity(vllm_config: VllmConfig, network: str = "") -> dict[str, str]:
    """Identity of the weights, and of their use.

    `network`: in which KV is read between machines. `vllm_config` is that of an engine that has not started yet: models
    go by the `max-model-len` with which they are built, and it may shrink to what there is memory for.
    """
    found = {path: _text(attrgetter(path)(vllm_config)) for path in sorted(set(SETTLED.values()))}
    if network:
        return {**found, "network": network, "files": _contents(vllm_config.model_config)}
    return {**found, "files": files_identity(model_folder(vllm_config.model_config))}


def _contents(model: ModelConfig) -> str:
    """The model's weights, for other machines as well. Where this machine has no files to be read, the same name may
    stand for others there: then they are those of this machine alone."""
    folder = model_folder(model)
    if folder is None or model.model_weights:
        return f"unknown, on {machine_id()}"
    # The folder in a Hugging Face cache is called by its commit. Engines may fetch the weights later than this.
    return f"{folder.name}: {contents_identity(folder)}"


def fingerprints(
    core: Mapping[str, str],
    model: Mapping[str, str],
    lora: LoRAConfig | None,
    adapters: Iterable[LoRARequest],
) -> dict[str | None, str]:
    """Fingerprints of the KV that is computed without an adapter (None), and with each.

    `core` is what the engine core says (`identity_of`), `model` a `model_identity`.
    """
    prints: dict[str | None, str] = {None: _fingerprint(core, model)}
    prints |= {
        adapter.lora_name: _fingerprint(core, model, _adapter_identity(adapter, lora, by_content="network" in model))
        for adapter in adapters
        if lora is not None
    }
    return prints


def _adapter_identity(adapter: LoRARequest, lora: LoRAConfig, *, by_content: bool) -> dict[str, str]:
    """Identity of an adapter's weights, and of their use. (Its name and its folder are part of every block's hash.)"""
    settled = {name: _text(getattr(lora, name)) for name in _SETTLED_FOR_ADAPTERS}
    folder = Path(adapter.lora_path)
    return {
        **settled,
        "files": contents_identity(folder) if by_content else files_identity(folder, strictly=True),
        "3d": str(adapter.is_3d_lora_weight),
    }


def _text(value: object) -> str:
    """The same for what is the same, in every process."""
    if isinstance(value, PretrainedConfig):
        return hashlib.sha256(json.dumps(value.to_dict(), sort_keys=True, default=str).encode()).hexdigest()
    return repr(value)


def _fingerprint(*identities: Mapping[str, str]) -> str:
    data = json.dumps([dict(each) for each in identities], sort_keys=True).encode()
    return hashlib.sha256(data).hexdigest()[:32]


def model_folder(model: ModelConfig) -> Path | None:
    """Find the folder of the model's files on this machine, if they are files."""
    path = Path(model.model)
    if path.is_dir():
        return path
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(model.model, "config.json", revision=model.revision)
    return Path(config).parent if isinstance(config, str) else None


# Hashes of KV blocks, computed outside of the engine core exactly as it does.


class BlockHasher:
    """Hasher of one engine. Called with a context's tokens, salt and adapter, gives the hashes of its full blocks."""

    def __init__(self, cache_config: CacheConfig, block_size: int | None = None) -> None:
        """`block_size`: of the engine's blocks, in tokens, if the configuration does not say it."""
        function = get_hash_fn_by_name(cache_config.prefix_caching_hash_algo)
        init_none_hash(function)
        self._hasher = get_request_block_hasher(block_size or cache_config.block_size, function)

    def __call__(
        self, token_ids: Sequence[int], cache_salt: str | None, adapter: LoRARequest | None = None
    ) -> list[bytes]:
        # vLLM hashes requests; what goes into a hash beside the tokens (the salt of the first block, the adapter's
        # name and path) is its to know.
        request = Request(
            request_id="",
            prompt_token_ids=list(token_ids),
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            cache_salt=cache_salt,
            lora_request=adapter,
            block_hasher=self._hasher,
        )
        return list(request.block_hashes)
