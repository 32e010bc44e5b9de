"""Processor, cores, memory, shared memory, and the number of open files: from /proc and the control groups (versions 1
and 2); known faults and settings of the Linux kernel that matter, and the clock."""

from __future__ import annotations

import os
import platform
import re
import resource
import time
from collections.abc import Iterator
from pathlib import Path

from dynamo_local.control.answers import Finding, fail, ok, warn
from dynamo_local.core.sizing.memory import ENGINE_SHARED_BYTES
from dynamo_local.doctor.files import GIB, number_of, shown_bytes, text_of
from state.devices.inventory import usable_cores
from state.files import room as room_of
from state.remains import SHARED_MEMORY

_LITTLE_MEMORY = 3 * GIB
"""A worker's process with vLLM and torch takes about 1 GiB, and the example configurations give it 1 GiB of KV."""

_FEW_FILES = 4096
_CGROUPS = Path("/sys/fs/cgroup")

_FAULT_FROM, _FAULT_BEFORE = (6, 13, 0), (6, 18, 45)
"""Kernels with the scheduling fault of docs/internals/cores.md: since "sched/fair: Fix EEVDF entity placement bug
causing scheduling lag" (6d71a9c61604), which 6.18.45 reverts (https://github.com/ejc3/fcvm/pull/940)."""
_SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies", "pit")
_BUILT_S = 1735689600.0
"""The beginning of 2025. This program is younger."""
_RELEASE = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")


def check_machine(has_gpus: bool) -> Iterator[Finding]:
    architecture = platform.machine()
    yield system(architecture, _glibc())
    if architecture == "x86_64":
        yield processor(_flags(), has_gpus)
    yield cores(len(usable_cores()), _quota())
    yield memory(_available(), _available_in_cgroup())
    yield shared_memory(room_of(SHARED_MEMORY))
    yield open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))


def system(architecture: str, glibc: tuple[int, int] | None) -> Finding:
    library = "no glibc" if glibc is None else f"glibc {glibc[0]}.{glibc[1]}"
    found = f"{architecture}, {library}"
    if architecture == "x86_64" and glibc is not None and glibc >= (2, 31):
        return ok("system", found)
    return warn("system", f"{found}: not tested", "use Linux on x86-64 with glibc 2.31 or newer")


def processor(flags: frozenset[str] | None, has_gpus: bool) -> Finding:
    """`flags`: as in /proc/cpuinfo; None if it tells none."""
    if flags is None:
        return warn("processor", "/proc/cpuinfo lists no features", "mount /proc")
    if "avx2" not in flags:
        found = "no AVX2, without which vLLM's CPU build does not start"
        if has_gpus:
            return ok("processor", f"{found}; the GPUs do not need it")
        return fail("processor", found, "use a newer processor; a virtual machine can be given the host's features")
    if "avx512f" not in flags:
        return warn(
            "processor", "AVX2, but no AVX-512: vLLM computes slower on the CPU", "nothing, or a newer processor"
        )
    known = {"avx512_bf16": "AVX512-BF16", "amx_bf16": "AMX"}
    fast = [name for flag, name in known.items() if flag in flags]
    bfloat16 = f"bfloat16 is fast by {' and '.join(fast)}" if fast else "bfloat16 is computed as float32, so it is slow"
    return ok("processor", f"AVX2 and AVX-512; {bfloat16}")


def cores(usable: int, quota: float | None) -> Finding:
    """`usable`: cores that this process may use. `quota`: cores' worth of time that the cgroup allows."""
    found = f"{usable} core{'' if usable == 1 else 's'}"
    if quota is not None and quota < usable:
        slots = max(1, int(quota))
        return warn(
            "cores",
            f"{found}, but the cgroup allows the time of {quota:g}: workers would be stopped again and again",
            f"start fewer workers (`--cpu-slots {slots}`), or raise the limit (cpu.max)",
        )
    return ok("cores", found)


def memory(available: int | None, in_cgroup: int | None) -> Finding:
    """Bytes that are available: on the machine, and within the cgroup's limit; None without one."""
    known = [number for number in (available, in_cgroup) if number is not None]
    if not known:
        return warn("memory", "the available memory is not known", "mount /proc")
    least = min(known)
    limit = " within the cgroup's limit" if least == in_cgroup else ""
    found = f"{shown_bytes(least)} available{limit}"
    if least < _LITTLE_MEMORY:
        return warn("memory", f"{found}: a small model needs about {shown_bytes(_LITTLE_MEMORY)}", "free some memory")
    return ok("memory", found)


def shared_memory(room: tuple[int, int] | None) -> Finding:
    """`room`: bytes free and in all."""
    if room is None:
        return fail("shared memory", "there is no /dev/shm", "mount a tmpfs there")
    free, size = room
    found = f"{shown_bytes(free)} of {shown_bytes(size)} free in /dev/shm"
    if free < ENGINE_SHARED_BYTES:
        return warn(
            "shared memory",
            f"{found}: vLLM needs {shown_bytes(ENGINE_SHARED_BYTES)} on a CPU and for tensor parallelism",
            "free some, enlarge it (`mount -o remount,size=1G /dev/shm`), or give the container --shm-size 1g",
        )
    return ok("shared memory", found)


def open_files(soft: int, hard: int) -> Finding:
    """The limits of a process."""
    found = f"up to {soft} open files (hard limit {hard})"
    if soft < _FEW_FILES:
        return warn(
            "open files", f"{found}: many clients at once need more", f"run `ulimit -n {_FEW_FILES * 4}` before"
        )
    return ok("open files", found)


def _glibc() -> tuple[int, int] | None:
    try:
        version = os.confstr("CS_GNU_LIBC_VERSION")
    except (OSError, ValueError):
        return None
    parts = (version or "").removeprefix("glibc ").split(".")
    return (int(parts[0]), int(parts[1])) if len(parts) >= 2 else None


def _flags() -> frozenset[str] | None:
    for line in (text_of("/proc/cpuinfo") or "").splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return None


def _available() -> int | None:
    for line in (text_of("/proc/meminfo") or "").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _groups(controller: str) -> Iterator[Path]:
    """The folders of this process's control group for the controller, and of all above it, whose limits hold as well.

    A container may show the folder of its group as the root, so that is among them.
    """
    for line in (text_of("/proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _CGROUPS / controllers if controllers else _CGROUPS
        folder = root / path.lstrip("/")
        yield from (each for each in (folder, *folder.parents) if each == root or each.is_relative_to(root))


def _available_in_cgroup() -> int | None:
    left: list[int] = []
    for group in _groups("memory"):
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, used = number_of(group / limit_name), number_of(group / used_name)
            if limit is not None and used is not None:
                left.append(max(0, limit - used + _cached(group)))
    return min(left) if left else None


def _cached(group: Path) -> int:
    """Bytes of files in memory that the kernel drops when memory is needed; they count as used."""
    found = 0
    for line in (text_of(group / "memory.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "active_file"):
            found += int(value)
    return found


def _quota() -> float | None:
    found: list[float] = []
    for group in _groups("cpu"):
        quota, _, period = (text_of(group / "cpu.max") or "").partition(" ")
        if quota.isdigit() and period.isdigit():
            found.append(int(quota) / int(period))
        old, old_period = number_of(group / "cpu.cfs_quota_us"), number_of(group / "cpu.cfs_period_us")
        if old is not None and old_period:
            found.append(old / old_period)
    return min(found) if found else None


def check_kernel() -> Iterator[Finding]:
    yield scheduling(platform.release(), number_of("/proc/sys/kernel/sched_autogroup_enabled"))
    yield ptrace(number_of("/proc/sys/kernel/yama/ptrace_scope"))
    yield clock(text_of("/sys/devices/system/clocksource/clocksource0/current_clocksource"), time.time())


def scheduling(release: str, autogroup: int | None) -> Finding:
    """`release`: as uname tells it. `autogroup`: 0 if Linux does not share cores among sessions."""
    match = _RELEASE.match(release)
    found = f"Linux {release}"
    if match is None:
        return ok("kernel", found)
    version = (int(match[1]), int(match[2]), int(match[3] or 0))
    if _FAULT_FROM <= version < _FAULT_BEFORE and autogroup != 0:
        return warn(
            "kernel",
            f"{found} can keep other programs from the cores of a session or container whose processes wake up often",
            "use Linux 6.18.45 or newer (docs/internals/cores.md)",
        )
    return ok("kernel", found)


def ptrace(scope: int | None) -> Finding:
    """`scope`: Yama's setting; None without Yama."""
    if scope is None:
        return ok("ptrace", "no Yama: processes of one user may read each other's memory, as KV transfer on CPUs does")
    if scope <= 1:
        return ok("ptrace", f"kernel.yama.ptrace_scope is {scope}: workers on CPUs can lend each other KV")
    return warn(
        "ptrace",
        f"kernel.yama.ptrace_scope is {scope}: workers on CPUs cannot lend each other KV, and compute it again",
        "`sysctl kernel.yama.ptrace_scope=1` (docs/security.md)",
    )


def clock(source: str | None, wall_clock_s: float) -> Finding:
    """`source`: the kernel's clock source. `wall_clock_s`: seconds since 1970."""
    if wall_clock_s < _BUILT_S:
        return fail("clock", "the clock is years behind: TLS certificates look invalid", "set the clock")
    if source in _SLOW_CLOCKS:
        return warn("clock", f"the clock source {source} is slow to read", "use tsc or kvm-clock, if the machine can")
    return ok("clock", f"clock source {source or 'not known'}")
