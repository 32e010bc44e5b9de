"""Who used how much CPU: process trees, what each process is for, and the time it took. Reads /proc."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PARENT, _USER, _SYSTEM, _START = 1, 11, 12, 19  # positions after the command's closing parenthesis in /proc/PID/stat
_IDLE, _IOWAIT, _STEAL, _ACCOUNTED = 3, 4, 7, 8  # columns of the first line of /proc/stat

CLIENT = "client"
OTHER = "other"

_ROLES = (
    ("VLLM::EngineCore", "EngineCore"),
    ("VLLM::Worker", "Worker"),
    ("--service Frontend", "frontend"),
    ("--service Router", "router"),
    ("--service Planner", "planner"),
    ("--service VllmWorker", "worker host"),
    ("--service PrefillWorker", "prefill host"),
    (".forkserver", "forkserver"),
    ("nats-server", "nats"),
    ("circusd", "circusd"),
    ("dynamo serve", "dynamo serve"),
    ("vllm.entrypoints.launchers.api_server.entry", "API server"),
)
"""What a command line contains, and what its process is for. The first that matches counts."""


@dataclass(frozen=True)
class Stat:
    """A line of /proc/PID/stat, as far as it is wanted here."""

    cpu_s: float
    started_s: float
    """Since boot."""
    parent: int


@dataclass(frozen=True)
class Process:
    """A process, beyond doubt: a pid is used again, a pid with its start time is not."""

    pid: int
    started_s: float
    role: str


def parse_stat(text: str) -> Stat:
    """A process's line. Its command may hold spaces and parentheses."""
    fields = text.rpartition(")")[2].split()
    ticks = int(fields[_USER]) + int(fields[_SYSTEM])
    return Stat(ticks * _TICK_S, int(fields[_START]) * _TICK_S, int(fields[_PARENT]))


def parse_machine(text: str) -> tuple[float, float]:
    """Seconds that all cores together were busy, and that the host took from them, since boot."""
    columns = [int(column) * _TICK_S for column in text.splitlines()[0].split()[1 : _ACCOUNTED + 1]]
    return sum(columns) - columns[_IDLE] - columns[_IOWAIT] - columns[_STEAL], columns[_STEAL]


def role_of(command: str) -> str:
    """What a process with this command line is for."""
    return next((role for part, role in _ROLES if part in command), OTHER)


def read_stat(pid: int) -> Stat | None:
    """None if the process is gone."""
    try:
        return parse_stat((_PROC / str(pid) / "stat").read_text(errors="replace"))
    except OSError:
        return None


def descendants(root: int) -> tuple[Process, ...]:
    """The process and all that descend from it, by pid."""
    pids = sorted(int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit())
    stats = {pid: stat for pid in pids if (stat := read_stat(pid)) is not None}
    found = {root} & stats.keys()
    while more := {pid for pid, stat in stats.items() if stat.parent in found} - found:
        found |= more
    return tuple(Process(pid, stats[pid].started_s, role_of(command(pid))) for pid in sorted(found))


def is_alive(process: Process) -> bool:
    """Whether that very process is there (a zombie counts)."""
    stat = read_stat(process.pid)
    return stat is not None and stat.started_s == process.started_s


@dataclass(frozen=True)
class Usage:
    """CPU seconds up to a moment, or (as a difference) between two."""

    roles: Mapping[str, float]
    busy_s: float
    stolen_s: float
    at: float

    def since(self, before: Usage) -> Usage:
        """What was used between the two."""
        roles = {role: spent - before.roles.get(role, 0.0) for role, spent in self.roles.items()}
        return Usage(roles, self.busy_s - before.busy_s, self.stolen_s - before.stolen_s, self.at - before.at)

    @property
    def foreign_cores(self) -> float:
        """For a difference: cores that others kept busy meanwhile, on this machine or on its host."""
        return max(0.0, self.busy_s - sum(self.roles.values()) + self.stolen_s) / self.at if self.at else 0.0


def cpu_s(root: int) -> float:
    """CPU seconds that a process and its descendants have used. Other work on the machine hardly changes them."""
    return sum(stat.cpu_s for process in descendants(root) if (stat := read_stat(process.pid)) is not None)


def usage(processes: Iterable[Process]) -> Usage:
    """What the processes, and this one as the client, have used so far."""
    roles: defaultdict[str, float] = defaultdict(float, {CLIENT: time.process_time()})
    for process in processes:
        stat = read_stat(process.pid)
        if stat is not None:
            roles[process.role] += stat.cpu_s
    busy_s, stolen_s = parse_machine((_PROC / "stat").read_text())
    return Usage(dict(roles), busy_s, stolen_s, time.monotonic())


def add(usages: Iterable[Usage]) -> Usage:
    """Differences, summed."""
    roles: defaultdict[str, float] = defaultdict(float)
    busy_s = stolen_s = duration_s = 0.0
    for each in usages:
        for role, spent in each.roles.items():
            roles[role] += spent
        busy_s, stolen_s, duration_s = busy_s + each.busy_s, stolen_s + each.stolen_s, duration_s + each.at
    return Usage(dict(roles), busy_s, stolen_s, duration_s)


def command(pid: int) -> str:
    """The command line of a process; empty if it is gone."""
    try:
        return (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
