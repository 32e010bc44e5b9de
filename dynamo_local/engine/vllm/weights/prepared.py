"""Weights of a prepared process: loaded there once, used by the engines of workers that are forked from it.

A fork has the model as it was at the fork, in private pages: it shares those that nobody has written to, and what it
writes itself no other process sees.
"""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Mapping
from typing import Any

import msgspec

from dynamo_local.core.errors import EngineError, StateError, one_line
from dynamo_local.core.names import NAMESPACE_ENV, WATCHER_ENV, parse_watcher
from dynamo_local.core.sizing.memory import ENGINE_BYTES
from dynamo_local.engine.vllm.patches.check import applies
from dynamo_local.engine.vllm.patches.loaded_model import Loaded, forget_tokenizer, load_alone, use_loaded
from dynamo_local.process.forkserver.prepared.orders import PreparedOrder, write_order
from state.paths import StatePaths

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
    from dynamo_local.engine.vllm.weights.key import files_of

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
    from dynamo_local.engine.vllm.weights.key import files_of

    recipe, loaded = _prepared
    return loaded.config.kv_transfer_config is not None and _encoded(files_of(loaded.config)) == recipe.files


def settle_weights(vllm_config: Any, config: Mapping[str, Any], *, wanted: bool) -> PreparedOrder | None:
    """Have the engine that is about to be forked use the weights that this process has, if they are its own.

    Returns the order for a process with its weights, for later workers; None if they are not shared.
    """
    from dynamo_local.engine.vllm.weights.key import why_not_shared

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
    from dynamo_local.engine.vllm.weights.key import files_of, weight_bytes, weights_key

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
