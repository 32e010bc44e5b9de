"""Memory of the machine and of control groups, read from files as Linux writes them."""

from __future__ import annotations

import os
from pathlib import Path

from state.machine.memory import Memory, machine_memory, memory_of

GIB = 2**30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MACHINE = {"proc/meminfo": f"MemTotal: {32 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {24 * 2**20} kB\n"}


def test_without_limits_it_is_that_of_the_machine(tmp_path: Path) -> None:
    unlimited = {
        "proc/self/cgroup": "0::/user\n",
        "sys/fs/cgroup/user/memory.max": "max\n",
        "sys/fs/cgroup/user/memory.current": "5\n",
    }
    assert machine_memory(write(tmp_path, MACHINE)) == Memory(32 * GIB, 24 * GIB)
    assert machine_memory(write(tmp_path, unlimited)) == Memory(32 * GIB, 24 * GIB)


def test_the_limit_of_a_group_above_counts_and_its_idle_cache_is_free(tmp_path: Path) -> None:
    group = {
        "proc/self/cgroup": "0::/pod/container\n",
        "sys/fs/cgroup/pod/memory.max": str(8 * GIB),
        "sys/fs/cgroup/pod/memory.current": str(6 * GIB),
        "sys/fs/cgroup/pod/memory.stat": f"anon 1\ninactive_file {2 * GIB}\n",
    }
    assert machine_memory(write(tmp_path, MACHINE | group)) == Memory(8 * GIB, 4 * GIB)


def test_in_a_container_the_group_is_the_root_of_what_it_sees(tmp_path: Path) -> None:
    group = {
        "proc/self/cgroup": "0::/../outside\n",
        "sys/fs/cgroup/memory.max": str(4 * GIB),
        "sys/fs/cgroup/memory.current": str(GIB),
    }
    assert machine_memory(write(tmp_path, MACHINE | group)) == Memory(4 * GIB, 3 * GIB)


def test_version_1_of_control_groups(tmp_path: Path) -> None:
    group = {
        "proc/self/cgroup": "5:cpu,memory:/job\n1:name=systemd:/\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(2 * GIB),
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": str(GIB),
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(9 * GIB),
    }
    assert machine_memory(write(tmp_path, MACHINE | group)) == Memory(2 * GIB, GIB)


def test_what_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    assert machine_memory(tmp_path) is None
    assert machine_memory(write(tmp_path, {"proc/meminfo": "nonsense"})) is None


def test_processes_hold_their_part_of_what_they_share(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {"proc/1/smaps_rollup": "00-ff ---p [rollup]\nRss: 9 kB\nPss: 3 kB\n", "proc/2/smaps_rollup": "Pss: 4 kB\n"},
    )
    assert memory_of([1, 2, 77], root) == 7 * 1024
    (root / "proc/3").mkdir()
    assert memory_of([1, 3], root) is None
    assert (memory_of([os.getpid()]) or 0) > 0
