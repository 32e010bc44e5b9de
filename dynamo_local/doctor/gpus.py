"""Facts about GPUs, by NVML, which opens no CUDA context."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

from dynamo_local.core.doctor.gpus import Gpu, Gpus
from dynamo_local.engine.vllm.kv.local_users import other_users
from state.devices.inventory import Nvml, driver_present, load_nvml


def gpus(vllm: str | None, torch_cuda: str | None, ours: Collection[int]) -> Gpus:
    """`vllm`: the installed distribution. `ours`: pids of the processes of this user's servers."""
    present, nvml = driver_present(), load_nvml()
    without = Gpus(present, torch_cuda=torch_cuda, vllm=vllm)
    if nvml is None:
        return Gpus(
            present, "the package nvidia-ml-py is missing" if present else None, torch_cuda=torch_cuda, vllm=vllm
        )
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Gpus(True, str(error), torch_cuda=torch_cuda, vllm=vllm) if present else without
    try:
        return _found(nvml, vllm, torch_cuda, ours)
    except nvml.NVMLError as error:
        return Gpus(True, str(error), torch_cuda=torch_cuda, vllm=vllm)
    finally:
        nvml.nvmlShutdown()


def _found(nvml: Nvml, vllm: str | None, torch_cuda: str | None, ours: Collection[int]) -> Gpus:
    library = cast(Any, nvml)
    cuda = library.nvmlSystemGetCudaDriverVersion_v2()  # 12040 is 12.4
    devices = tuple(_gpu(library, index, ours) for index in range(nvml.nvmlDeviceGetCount()))
    return Gpus(
        True,
        None,
        _text(library.nvmlSystemGetDriverVersion()),
        (cuda // 1000, cuda % 1000 // 10),
        devices,
        torch_cuda,
        vllm,
        tuple(other_users()),
    )


def _gpu(library: Any, index: int, ours: Collection[int]) -> Gpu:
    handle = library.nvmlDeviceGetHandleByIndex(index)
    memory = library.nvmlDeviceGetMemoryInfo(handle)
    pids = tuple(process.pid for process in library.nvmlDeviceGetComputeRunningProcesses(handle))
    return Gpu(
        index, _text(library.nvmlDeviceGetName(handle)), memory.total, memory.used, pids, bool(set(pids) & set(ours))
    )


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
