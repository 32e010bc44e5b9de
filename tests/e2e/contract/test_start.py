"""What an engine's start leaves out, and what its forks inherit (patches)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from vllm import logger
from vllm.config.logging import LoggingConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import registry
from vllm.platforms import current_platform
from vllm.plugins import DEFAULT_PLUGINS_GROUP
from vllm.triton_utils import dispatcher
from vllm.utils import cpu_resource_utils
from vllm.v1.engine import core
from vllm.v1.executor import multiproc_executor
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.logits_processor import LOGITSPROCS_GROUP
from vllm.v1.worker import utils

from dynamo_local.engine.vllm.patches.forks import (
    GROUPS,
    ask_nvml_in_children,
    configure_logging_early,
    configure_logging_once,
    list_cores_once,
    look_at_models_here,
    register_kernels_once,
)
from dynamo_local.engine.vllm.patches.tuning import zero_kv_at_first_use

_KV_BYTES = 64 * 2**20


@pytest.fixture
def lazy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utils, "torch", torch)
    zero_kv_at_first_use()


def resident() -> int:
    """Memory of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_a_kv_cache_is_zero_and_takes_no_memory_until_it_is_used(lazy: None) -> None:
    class Tensor:
        """As vLLM describes the memory of a layer without views."""

        size = _KV_BYTES
        layers = ("layer",)

    class Group:
        layer_names = ("layer",)
        kv_cache_spec = type("Spec", (), {"has_layer_views": False})()

    config: Any = KVCacheConfig(num_blocks=1, kv_cache_tensors=[Tensor()], kv_cache_groups=[Group()])  # type: ignore[list-item]
    before = resident()
    layout: Any = None
    cache = utils.allocate_kv_cache(config, torch.device("cpu"), layout)["layer"]
    assert (cache.dtype, cache.numel()) == (torch.int8, _KV_BYTES)
    assert resident() - before < _KV_BYTES // 4
    cache[_KV_BYTES // 2 :] = 1
    assert resident() - before > _KV_BYTES // 4
    assert int(cache[: _KV_BYTES // 2].count_nonzero()) == 0


@pytest.mark.parametrize(
    "made",
    [
        {"size": (4, 5), "dtype": torch.int32, "device": "cpu"},
        {"size": (2**21,), "dtype": torch.float32, "device": torch.device("cpu")},
        {"size": (10,), "dtype": torch.int8, "device": "cpu"},
    ],
)
def test_other_tensors_are_made_as_before(lazy: None, made: dict[str, Any]) -> None:
    size = made.pop("size")
    patched: Any = vars(utils)["torch"]
    assert torch.equal(patched.zeros(*size, **made), torch.zeros(*size, **made))


def test_kernels_are_replaced_once_and_in_modules_that_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    platform: Any = type(current_platform)
    monkeypatch.setattr(
        platform, "register_triton_kernel_overrides", vars(platform)["register_triton_kernel_overrides"]
    )
    walks: list[None] = []
    rebind = dispatcher._rebind_kernels

    def walk(overrides: Any) -> None:
        walks.append(None)
        rebind(overrides)

    monkeypatch.setattr(dispatcher, "_rebind_kernels", walk)
    register_kernels_once()
    current_platform.register_triton_kernel_overrides()
    assert len(walks) == 1
    later = ModuleType("later")
    exec("from vllm.v1.sample.rejection_sampler import expand_kernel", vars(later))
    assert isinstance(later.expand_kernel, dispatcher.KernelOverride)
    assert later.expand_kernel is rejection_sampler.expand_kernel
    assert "later" not in sys.modules


def no_program(*_: Any, **__: Any) -> Any:
    raise AssertionError("a program is run")


def test_cores_are_listed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_resource_utils, "_get_cpu_list", cpu_resource_utils._get_cpu_list)
    before = cpu_resource_utils.get_allowed_cpu_list()
    list_cores_once()
    monkeypatch.setattr(subprocess, "check_output", no_program)
    assert cpu_resource_utils.get_allowed_cpu_list() == before
    # Those of this process, as they are now.
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {before[0].id})
    try:
        assert cpu_resource_utils.get_allowed_cpu_list() == before[:1]
    finally:
        os.sched_setaffinity(0, allowed)


def test_nvml_is_asked_once_and_in_a_process_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library() -> list[str]:
        raise OSError("libnvidia-ml.so.1: cannot open shared object file")

    cuda: Any = torch.cuda
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(cuda, "_raw_device_count_nvml", os.getpid)
    monkeypatch.setattr(cuda, "_raw_device_uuid_nvml", no_library)
    ask_nvml_in_children()
    asked = cuda._raw_device_count_nvml()
    assert asked == cuda._raw_device_count_nvml() != os.getpid()
    assert not Path(f"/proc/{asked}").exists()
    # torch knows what to do without NVML.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-11111111")
    assert cuda._device_count_nvml() == -1


def test_a_model_is_looked_at_in_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # There are no notes of earlier starts in it.
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(registry, "_run_in_subprocess", registry._run_in_subprocess)
    monkeypatch.setattr(subprocess, "run", no_program)
    look_at_models_here()
    bert = registry.ModelRegistry.models["BertModel"].inspect_model_cls()
    assert bert.is_pooling_model
    assert not bert.is_text_generation_model


def test_logging_is_configured_where_it_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (core, multiproc_executor):
        monkeypatch.setattr(module, "configure_logging", logger.configure_logging)
    configured: list[LoggingConfig] = []
    monkeypatch.setattr(logger, "configure_logging", configured.append)
    config = LoggingConfig()
    monkeypatch.setattr(logger, "_last_configured_logging_config", config)
    configure_logging_once()
    other = LoggingConfig(log_level="DEBUG" if config.log_level != "DEBUG" else "INFO")
    for module in (core, multiproc_executor):
        module.configure_logging(config)
        module.configure_logging(other)
    assert configured == [other, other]


def test_logging_is_configured_early_as_an_engine_without_settings_of_it_would(monkeypatch: pytest.MonkeyPatch) -> None:
    configured: list[LoggingConfig] = []
    monkeypatch.setattr(logger, "configure_logging", configured.append)
    monkeypatch.setattr(logger, "_last_configured_logging_config", None)
    configure_logging_early()
    assert configured == [EngineArgs(model="none").create_logging_config()]


def test_the_plugins_that_are_listed_early_are_those_that_an_engine_looks_for() -> None:
    assert set(GROUPS) == {DEFAULT_PLUGINS_GROUP, LOGITSPROCS_GROUP}
