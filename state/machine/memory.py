"""Reads how much memory there is: of the machine, within its control group, and of GPUs. Unknown is None."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from state.devices.inventory import load_nvml

_UNLIMITED = 1 << 60
"""Control groups of version 1 write a number about as large as this where there is no limit."""


@dataclass(frozen=True)
class Memory:
    """Bytes in all, and those that are free or can be freed at once."""

    total: int
    free: int


class _Nvml(Protocol):
    NVMLError: type[Exception]

    # Names are the library's.
    def nvmlInit(self) -> None: ...  # noqa: N802
    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> object: ...  # noqa: N802
    def nvmlDeviceGetMemoryInfo(self, handle: object) -> _MemoryInfo: ...  # noqa: N802


class _MemoryInfo(Protocol):
    total: int
    free: int


def machine_memory(root: Path = Path("/")) -> Memory | None:
    """Memory that this process may use: that of the machine or, where that is less, of its control groups.

    `root`: root of the file system. None if it cannot be read.
    """
    readings = [_of_machine(root), *_of_groups(root)]
    known = [reading for reading in readings if reading is not None]
    if not known:
        return None
    return Memory(min(memory.total for memory in known), min(memory.free for memory in known))


def gpu_memories(uuids: Sequence[str]) -> tuple[Memory, ...]:
    """Memory of the GPUs with these UUIDs; empty if NVML does not tell that of all of them."""
    nvml = cast("_Nvml | None", load_nvml())
    if nvml is None or not uuids:
        return ()
    try:
        nvml.nvmlInit()
        told = [nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByUUID(uuid)) for uuid in uuids]
    except nvml.NVMLError:
        return ()
    return tuple(Memory(int(one.total), int(one.free)) for one in told)


def memory_of(pids: Iterable[int], root: Path = Path("/")) -> int | None:
    """Bytes that these processes hold, of what they share with others their part. None if one is not readable."""
    total = 0
    for pid in pids:
        words = _text(root / f"proc/{pid}/smaps_rollup").split()
        if "Pss:" in words[:-1]:
            total += int(words[words.index("Pss:") + 1]) * 1024
        elif (root / f"proc/{pid}").exists():
            return None
    return total


def _of_machine(root: Path) -> Memory | None:
    lines = _text(root / "proc/meminfo").splitlines()
    fields = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    try:
        return Memory(*(int(fields[name][0]) * 1024 for name in ("MemTotal", "MemAvailable")))
    except (KeyError, IndexError, ValueError):
        return None


def _of_groups(root: Path) -> Iterator[Memory | None]:
    """Limits of the control group of this process and of those above it, of either version."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            yield from _along(root / "sys/fs/cgroup", path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            yield from _along(base, path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _along(base: Path, path: str, limit: str, usage: str, cache: str) -> Iterator[Memory | None]:
    # In a container the path may be that of the host; then only the base is there.
    folder = base / path.strip("/")
    for place in dict.fromkeys((folder, *folder.parents)):
        if place.is_relative_to(base):
            yield _of_group(place, limit, usage, cache)


def _of_group(folder: Path, limit: str, usage: str, cache: str) -> Memory | None:
    most, used = _number(folder / limit), _number(folder / usage)
    if most is None or used is None or most >= _UNLIMITED:
        return None
    words = _text(folder / "memory.stat").split()
    # Pages of files that nobody uses now are given up before the limit is felt.
    cached = int(words[words.index(cache) + 1]) if cache in words[:-1] else 0
    return Memory(most, max(most - max(used - cached, 0), 0))


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
