"""Processor, cores, memory, shared memory, and the number of open files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dynamo_local.core.doctor.finding import GIB, Finding, fail, ok, shown_bytes, warn
from dynamo_local.core.process.shared_memory import ENGINE_SHARED_BYTES

_LITTLE_MEMORY = 3 * GIB
"""A worker's process with vLLM and torch takes about 1 GiB, and the example configurations give it 1 GiB of KV."""

_FEW_FILES = 4096


@dataclass(frozen=True)
class Machine:
    """`flags`: the processor's, as in /proc/cpuinfo; None if it tells none. `cores`: those that this process may use.
    `quota`: cores' worth of time that the cgroup allows. `available`: bytes of memory, within the cgroup's limit.
    `limited_by_cgroup`: whether that limit is the tighter one. `shm_free` and `shm_size`: bytes of /dev/shm."""

    architecture: str
    glibc: tuple[int, int] | None
    flags: frozenset[str] | None
    cores: int
    quota: float | None
    available: int | None
    limited_by_cgroup: bool
    shm_free: int | None
    shm_size: int | None
    open_files: int
    open_files_limit: int
    has_gpus: bool


def check_machine(facts: Machine) -> Iterator[Finding]:
    yield _system(facts)
    if facts.architecture == "x86_64":
        yield _processor(facts)
    yield _cores(facts)
    yield _memory(facts)
    yield _shared_memory(facts)
    yield _open_files(facts)


def _system(facts: Machine) -> Finding:
    glibc = "no glibc" if facts.glibc is None else f"glibc {facts.glibc[0]}.{facts.glibc[1]}"
    found = f"{facts.architecture}, {glibc}"
    if facts.architecture == "x86_64" and facts.glibc is not None and facts.glibc >= (2, 31):
        return ok("system", found)
    return warn("system", f"{found}: not tested", "use Linux on x86-64 with glibc 2.31 or newer")


def _processor(facts: Machine) -> Finding:
    if facts.flags is None:
        return warn("processor", "/proc/cpuinfo lists no features", "mount /proc")
    if "avx2" not in facts.flags:
        found = "no AVX2, without which vLLM's CPU build does not start"
        if facts.has_gpus:
            return ok("processor", f"{found}; the GPUs do not need it")
        return fail("processor", found, "use a newer processor; a virtual machine can be given the host's features")
    if "avx512f" not in facts.flags:
        return warn(
            "processor", "AVX2, but no AVX-512: vLLM computes slower on the CPU", "nothing, or a newer processor"
        )
    known = {"avx512_bf16": "AVX512-BF16", "amx_bf16": "AMX"}
    fast = [name for flag, name in known.items() if flag in facts.flags]
    bfloat16 = f"bfloat16 is fast by {' and '.join(fast)}" if fast else "bfloat16 is computed as float32, so it is slow"
    return ok("processor", f"AVX2 and AVX-512; {bfloat16}")


def _cores(facts: Machine) -> Finding:
    found = f"{facts.cores} core{'' if facts.cores == 1 else 's'}"
    if facts.quota is not None and facts.quota < facts.cores:
        slots = max(1, int(facts.quota))
        return warn(
            "cores",
            f"{found}, but the cgroup allows the time of {facts.quota:g}: workers would be stopped again and again",
            f"start fewer workers (`--cpu-slots {slots}`), or raise the limit (cpu.max)",
        )
    return ok("cores", found)


def _memory(facts: Machine) -> Finding:
    if facts.available is None:
        return warn("memory", "the available memory is not known", "mount /proc")
    limit = " within the cgroup's limit" if facts.limited_by_cgroup else ""
    found = f"{shown_bytes(facts.available)} available{limit}"
    if facts.available < _LITTLE_MEMORY:
        return warn("memory", f"{found}: a small model needs about {shown_bytes(_LITTLE_MEMORY)}", "free some memory")
    return ok("memory", found)


def _shared_memory(facts: Machine) -> Finding:
    if facts.shm_free is None or facts.shm_size is None:
        return fail("shared memory", "there is no /dev/shm", "mount a tmpfs there")
    found = f"{shown_bytes(facts.shm_free)} of {shown_bytes(facts.shm_size)} free in /dev/shm"
    if facts.shm_free < ENGINE_SHARED_BYTES:
        return warn(
            "shared memory",
            f"{found}: vLLM needs {shown_bytes(ENGINE_SHARED_BYTES)} on a CPU and for tensor parallelism",
            "free some, enlarge it (`mount -o remount,size=1G /dev/shm`), or give the container --shm-size 1g",
        )
    return ok("shared memory", found)


def _open_files(facts: Machine) -> Finding:
    found = f"up to {facts.open_files} open files (hard limit {facts.open_files_limit})"
    if facts.open_files < _FEW_FILES:
        return warn(
            "open files", f"{found}: many clients at once need more", f"run `ulimit -n {_FEW_FILES * 4}` before"
        )
    return ok("open files", found)
