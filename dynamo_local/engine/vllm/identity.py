"""What a block's bytes mean, in a few words: engines that agree on it may read each other's KV.

One machine, one clock, one file system: files that look the same from outside (name, size, time) are taken for the
same. That is cheap, and errs on the side of computing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vllm.config import LoRAConfig, ModelConfig, VllmConfig
from vllm.lora.request import LoRARequest
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, MLAAttentionSpec
from vllm.version import __version__  # type: ignore[attr-defined]

_KINDS = (FullAttentionSpec, MLAAttentionSpec)
"""Each block of these holds the KV of its tokens, all of them, for all layers."""


def unsupported_reason(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str | None:
    """Why blocks of this engine cannot be read one by one, if so."""
    parallel = vllm_config.parallel_config
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1 or type(groups[0].kv_cache_spec) not in _KINDS:
        return "the model has layers other than full attention"
    if not vllm_config.cache_config.enable_prefix_caching:
        return "prefix caching is off"
    if vllm_config.speculative_config is not None:
        return "speculative decoding is on"
    if parallel.pipeline_parallel_size * parallel.decode_context_parallel_size * parallel.data_parallel_size != 1:
        return "the model is split other than by tensor parallelism"
    return None


def identity_of(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> dict[str, str]:
    """What the engine core's process knows, where everything has been settled."""
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


def model_identity(model: ModelConfig) -> dict[str, str]:
    """Which weights, and what is made of them."""
    config = json.dumps(model.hf_config.to_dict(), sort_keys=True, default=str)
    return {
        "model": model.model,
        "revision": str(model.revision),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "config": hashlib.sha256(config.encode()).hexdigest(),
        "files": _files(_folder(model)),
    }


def fingerprints(
    core: dict[str, str], vllm_config: VllmConfig, adapters: Iterable[LoRARequest]
) -> dict[str | None, str]:
    """Of the KV that is computed without an adapter (None), and with each; `core` is what the engine core says."""
    base, config = (core, model_identity(vllm_config.model_config)), vllm_config.lora_config
    prints: dict[str | None, str] = {None: _fingerprint(*base)}
    prints |= {
        adapter.lora_name: _fingerprint(*base, _adapter_identity(Path(adapter.lora_path), config))
        for adapter in adapters
        if config is not None
    }
    return prints


def _adapter_identity(folder: Path, config: LoRAConfig) -> dict[str, str]:
    """Which weights it has. (Its name and its folder are part of every block's hash.)"""
    return {"adapter files": _files(folder), "adapter dtype": str(config.lora_dtype)}


def _fingerprint(*identities: dict[str, str]) -> str:
    data = json.dumps(identities, sort_keys=True).encode()
    return hashlib.sha256(data).hexdigest()[:32]


def _folder(model: ModelConfig) -> Path | None:
    """Where the model's files are on this machine, if they are files."""
    path = Path(model.model)
    if path.is_dir():
        return path
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(model.model, "config.json", revision=model.revision)
    return Path(config).parent if isinstance(config, str) else None


def _files(folder: Path | None) -> str:
    """Names, sizes and times of the files there. (In a Hugging Face cache they are links to files named by content.)"""
    if folder is None:
        return "unknown"
    found: list[Any] = []
    for path in sorted(folder.iterdir()):
        target = path.resolve()
        if target.is_file():
            status = target.stat()
            found.append((path.name, target.name, status.st_size, status.st_mtime_ns))
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()
