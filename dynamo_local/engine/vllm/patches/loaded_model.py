"""A model that one process has loaded is used by the engines of processes that are forked from it (weights).

vLLM loads a model in the process that computes with it. Its layers refer to the configuration with which they were
made, and enter themselves and some settings there: a fork gets both into the configuration of its own engine.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dynamo_local.core.errors import one_line

_log = logging.getLogger(__name__)

_BY_CONTENT = ("static_forward_context", "static_all_moe_layers")
"""Layers by name, and names of layers, in vLLM's CompilationConfig."""


@dataclass(frozen=True)
class Loaded:
    """A model and the configuration with which it was made. `changes`: what its layers have set there, by part of the
    configuration and name."""

    model: Any
    config: Any
    changes: Mapping[str, Mapping[str, Any]]


def load_alone(configure: Callable[[], Any]) -> Loaded:
    """Make a model and load its weights in this process, by one thread and without making any other.

    `configure` makes the same configuration each time.
    """
    import torch
    import tqdm  # type: ignore[import-untyped]
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.model_executor.model_loader import get_model
    from vllm.utils.torch_utils import set_random_seed
    from vllm.v1.worker import cpu_model_runner

    # Bars of progress have a thread that watches them.
    tqdm.tqdm.monitor_interval = 0
    # Threads of OpenMP do not survive a fork.
    torch.set_num_threads(1)
    runner: Any = cpu_model_runner
    runner._set_torch_accelerator_to_noop()
    config = configure()
    with set_current_vllm_config(config), _lone_group(torch.distributed):
        init_distributed_environment(1, 0, "env://", 0, "fake")
        ensure_model_parallel_initialized(1, 1)
        set_random_seed(config.model_config.seed)
        model = get_model(vllm_config=config)
        changes = _changes(config, configure())
        _warm_up(model, config)
    return Loaded(model, config, changes)


def use_loaded(loaded: Loaded) -> None:
    """Have the engine that is forked from this process use the model, instead of loading it."""
    from vllm.v1.worker import cpu_model_runner

    def get_model(*, vllm_config: Any) -> Any:
        _join(vllm_config, loaded)
        return loaded.model

    runner: Any = cpu_model_runner
    runner.get_model = get_model


def forget_tokenizer() -> None:
    """Have this process load its tokenizer anew: that of the process from which it was forked may be another one."""
    from vllm.tokenizers.registry import cached_get_tokenizer

    cached_get_tokenizer.cache_clear()


def _warm_up(model: Any, config: Any) -> None:
    """Load the tokenizer, and compute one token without a KV cache. Forks need not make again what libraries make at
    first use: the kernels for the model's shapes, and what they remember of its operations."""
    import torch
    from vllm.forward_context import set_forward_context
    from vllm.tokenizers.registry import cached_tokenizer_from_config

    numbers = torch.zeros(1, dtype=torch.int64)
    try:
        cached_tokenizer_from_config(config.model_config)
        with torch.inference_mode(), set_forward_context(None, config, num_tokens=1):
            hidden = model(input_ids=numbers, positions=numbers)
            if config.model_config.runner_type == "generate":
                model.compute_logits(hidden)
    except Exception as error:  # noqa: BLE001  # code of any model
        # Workers then make themselves what is missing.
        _log.info("the loaded model is not warmed up: %s", one_line(error))


@contextmanager
def _lone_group(distributed: Any) -> Iterator[None]:
    """Make the one process group of a process that talks to nobody, and have vLLM make no other one."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    make = distributed.new_group
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    distributed.new_group = lambda *_, **__: distributed.group.WORLD
    try:
        yield
    finally:
        distributed.new_group = make


def _parts(config: Any) -> dict[str, Any]:
    """The parts of vLLM's configuration that have a state of their own, by name."""
    found = {each.name: getattr(config, each.name) for each in dataclasses.fields(config)}
    return {name: part for name, part in found.items() if dataclasses.is_dataclass(part) or name == "quant_config"}


def _changes(config: Any, fresh: Any) -> dict[str, dict[str, Any]]:
    before = _parts(fresh)
    return {
        name: _differing(vars(part), vars(before[name])) for name, part in _parts(config).items() if part is not None
    }


def _differing(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in now.items()
        if name not in _BY_CONTENT and (name not in before or not _same(before[name], value))
    }


def _same(one: Any, other: Any) -> bool:
    try:
        return bool(one == other) or repr(one) == repr(other)
    except Exception:  # noqa: BLE001  # of any class: what cannot be compared is taken for changed
        return False


def _join(config: Any, loaded: Loaded) -> None:
    """Give a configuration what the layers have set in theirs, and have them see this one from now on."""
    made = _parts(loaded.config)
    for name, part in _parts(config).items():
        theirs = made.get(name)
        if theirs is None or theirs is part:
            continue
        vars(part).update(loaded.changes.get(name, {}))
        if name == "compilation_config":
            part.static_forward_context.update(theirs.static_forward_context)
            part.static_all_moe_layers.extend(theirs.static_all_moe_layers)
        # One state under both names.
        object.__setattr__(theirs, "__dict__", vars(part))
    object.__setattr__(loaded.config, "__dict__", vars(config))
