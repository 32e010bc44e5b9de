"""Weights that workers share: loaded once in a prepared process (process/forkserver/prepared), used by the engines of
workers that are forked from it. Imports vLLM.

A fork has the model as it was at the fork, in private pages: it shares those that nobody has written to, and what it
writes itself no other process sees.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from vllm.config import CompilationMode, VllmConfig
from vllm.utils.cpu_resource_utils import get_memory_affinity

from dynamo_local.core.errors import EngineError, StateError, one_line
from dynamo_local.core.names import NAMESPACE_ENV, WATCHER_ENV, parse_watcher
from dynamo_local.core.sizing.memory import ENGINE_BYTES
from dynamo_local.engine.vllm.arguments import engine_schema
from dynamo_local.engine.vllm.kv.identity import model_folder, model_identity
from dynamo_local.engine.vllm.patches.loaded_model import Loaded, forget_tokenizer, load_alone, use_loaded
from dynamo_local.engine.vllm.patches.table import applies
from dynamo_local.process.forkserver.prepared.orders import PreparedOrder, write_order
from state.paths import StatePaths

# What the weights of an engine depend on, as a key: engines with the same key may use the same weights.
#
# Everything that an engine is given is in the key, unless it is known to concern no weight. That errs on the side of
# loading once more.

_FORMATS = frozenset({"auto", "hf", "safetensors", "pt", "mistral"})
"""Load formats that read the files of the model's folder, and nothing else."""

_OTHER_ARGUMENTS = frozenset({"served-model-name", "lora-modules"})
"""Arguments that change neither how a model is made nor its weights: adapters are loaded by each worker."""

_READ_BY_CODE = ("ATEN_", "DNNL_", "HF_", "KMP_", "MKL_", "OMP_", "ONEDNN_", "PYTORCH_", "TORCH_", "VLLM_")
_OTHER_VARIABLES = frozenset(
    {
        # Weights are loaded by one thread, and read by as many as there are.
        "OMP_NUM_THREADS",
        "VLLM_CPU_KVCACHE_SPACE",
        "VLLM_CPU_OMP_THREADS_BIND",
        "VLLM_RPC_BASE_PATH",
        "VLLM_WORKER_MULTIPROC_METHOD",
    }
)
"""Variables that differ between workers of one configuration, and concern no weight."""

_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth")


def why_not_shared(vllm_config: VllmConfig) -> str | None:
    """Say why weights of such an engine are not shared; None if they are."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    reasons = {
        "the engine has several processes that compute": parallel.world_size_across_dp != 1,
        "the engine compiles its model": vllm_config.compilation_config.mode != CompilationMode.NONE,
        "speculative decoding is on": vllm_config.speculative_config is not None,
        "its weights are changed while it runs": vllm_config.weight_transfer_config is not None,
        f"its load format is {vllm_config.load_config.load_format}": vllm_config.load_config.load_format
        not in _FORMATS,
        "it runs code from the model's folder": bool(model.trust_remote_code),
        "the model takes more than text": model.is_multimodal_model,
        "vLLM's other model runner is on": bool(vllm_config.use_v2_model_runner),
        "the model's files are not in a folder here": model_folder(model) is None,
        "the machine has several memory nodes": len(get_memory_affinity()) > 1,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def weights_key(vllm_config: VllmConfig, config: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> str:
    """The key of an engine whose processes have not started yet. `config`: its configuration."""
    known = engine_schema().keys()
    arguments = {name: value for name, value in config.items() if name in known and name not in _OTHER_ARGUMENTS}
    data = {
        **model_identity(vllm_config),
        "files": files_of(vllm_config),
        "arguments": arguments,
        "quantization": type(vllm_config.quant_config).__name__,
        "lora": repr(vllm_config.lora_config),
        "transfer": vllm_config.kv_transfer_config is not None,
        "environment": sorted(_environment(environ)),
    }
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()[:32]


def files_of(vllm_config: VllmConfig) -> list[list[object]]:
    """Identity of the files from which weights are loaded: by name, place, inode, size and time of the last change."""
    folder = model_folder(vllm_config.model_config)
    found: list[list[object]] = []
    for path in sorted(folder.iterdir() if folder is not None else ()):
        target = path.resolve()
        if target.is_file():
            status = target.stat()
            what = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            found.append([path.name, str(target), *what])
    return found


def weight_bytes(vllm_config: VllmConfig) -> int:
    """Size of the weights in memory, at most: files may hold them in half as many bytes as the engine."""
    folder = model_folder(vllm_config.model_config)
    files = [] if folder is None else [path for path in folder.iterdir() if path.suffix in _WEIGHT_FILES]
    # vLLM has settled it: it is one of PyTorch's by now.
    dtype: Any = vllm_config.model_config.dtype
    wider: int = max(dtype.itemsize // 2, 1)
    return sum(path.stat().st_size for path in files) * wider


def _environment(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name, value in environ.items():
        if name.startswith(_READ_BY_CODE) and name not in _OTHER_VARIABLES:
            yield name, value


PATCH = "weights that forks share"

_log = logging.getLogger(__name__)


class _Recipe(msgspec.Struct, frozen=True):
    """`config`: vLLM's configuration of the engine, pickled, from before its processes started. `files`: identity of
    the model's files then."""

    key: str
    config: bytes
    files: bytes


_prepared: tuple[_Recipe, Loaded] | None = None
"""Recipe and model, in a prepared process and in those forked from it."""


def prepare(recipe: bytes) -> None:
    """Load the weights in this process, without a second thread. Raises EngineError if the model's files are others
    than they were when this was ordered, and what vLLM raises."""
    global _prepared  # the one thing that forks of this process are to find

    wanted = msgspec.msgpack.decode(recipe, type=_Recipe)
    loaded = load_alone(lambda: pickle.loads(wanted.config))  # from a folder that is ours alone
    if _encoded(files_of(loaded.config)) != wanted.files:
        raise EngineError("the model's files have changed meanwhile", "they are loaded again once a worker has started")
    _prepared = wanted, loaded


def was_lent() -> bool:
    """Whether the process that this one is forked from has loaded weights of the model as it is now for an engine whose
    KV is transferred. False before that is known."""
    if _prepared is None:
        return False

    recipe, loaded = _prepared
    return loaded.config.kv_transfer_config is not None and _encoded(files_of(loaded.config)) == recipe.files


def settle_weights(vllm_config: Any, config: Mapping[str, Any], *, wanted: bool) -> PreparedOrder | None:
    """Have the engine that is about to be forked use the weights that this process has, if they are its own.

    Returns the order for a process with its weights, for later workers; None if they are not shared.
    """
    reason = "prepared-weights is off" if not wanted else why_not_shared(vllm_config)
    order = None
    if reason is None and applies(PATCH):
        order = _order_of(vllm_config, config)
    _use(None if order is None else order.key)
    if reason is not None:
        _log.debug("this engine's weights are not shared: %s", reason)
    return order


def order_prepared(order: PreparedOrder, environ: Mapping[str, str] = os.environ) -> None:
    """Order a process with these weights for workers that are configured as this one, whose engine has started. An
    engine outside of a server has none."""
    if WATCHER_ENV not in environ:
        return
    try:
        watcher = parse_watcher(environ[WATCHER_ENV])
        write_order(StatePaths.of(environ[NAMESPACE_ENV], environ), watcher, order)
    except StateError as error:
        _log.warning("later workers load their weights themselves: %s", error)


def _use(key: str | None) -> None:
    global _prepared  # memory that this process does not need is given up
    if _prepared is None:
        return
    (recipe, loaded), _prepared = _prepared, None
    if recipe.key == key:
        use_loaded(loaded)
    else:
        forget_tokenizer()
        _log.warning("the weights of the process that this one is forked from are others by now: it loads its own")


def _order_of(vllm_config: Any, config: Mapping[str, Any]) -> PreparedOrder | None:
    key = weights_key(vllm_config, config)
    try:
        pickled = pickle.dumps(vllm_config)
    except Exception as error:  # noqa: BLE001  # pickle promises nothing about what it raises
        _log.debug("this engine's weights are not shared: its configuration cannot be written: %s", one_line(error))
        return None
    recipe = msgspec.msgpack.encode(_Recipe(key, pickled, _encoded(files_of(vllm_config))))
    # What the engine that has just started may not have touched yet.
    keep_free = ENGINE_BYTES + (vllm_config.cache_config.kv_cache_memory_bytes or 0)
    return PreparedOrder(key, __name__, recipe, weight_bytes(vllm_config), keep_free)


def _encoded(files: list[list[object]]) -> bytes:
    return msgspec.msgpack.encode(files)
