"""Facts about processor, cores and memory, from /proc and the control groups (versions 1 and 2)."""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Iterator
from pathlib import Path

from dynamo_local.core.doctor.machine import Machine
from dynamo_local.doctor.files import number_of, text_of
from state.devices.inventory import usable_cores
from state.files import room
from state.remains import SHARED_MEMORY

_CGROUPS = Path("/sys/fs/cgroup")


def machine(has_gpus: bool) -> Machine:
    shared = room(SHARED_MEMORY)
    available, limit = _available(), _available_in_cgroup()
    files, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    known = [number for number in (available, limit) if number is not None]
    return Machine(
        architecture=platform.machine(),
        glibc=_glibc(),
        flags=_flags(),
        cores=len(usable_cores()),
        quota=_quota(),
        available=min(known) if known else None,
        limited_by_cgroup=limit is not None and limit == min(known),
        shm_free=shared[0] if shared else None,
        shm_size=shared[1] if shared else None,
        open_files=files,
        open_files_limit=most_files,
        has_gpus=has_gpus,
    )


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
