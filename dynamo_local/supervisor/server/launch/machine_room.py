"""Checks, before a server or more of its workers start, that the machine has room for them: disk, memory, shared
memory, open files, processes."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dynamo_local.core.errors import MemoryShortError, UsageError
from dynamo_local.core.fleet.view import ENGINE_ROLES
from dynamo_local.core.sizing.machine import counted, size
from dynamo_local.core.sizing.memory import ENGINE_SHARED_BYTES
from dynamo_local.supervisor.server.launch.templates import ServiceTemplate
from state.devices.allocation import DeviceKind
from state.files import free_bytes, nearest
from state.machine.memory import Memory, machine_memory
from state.machine.processes import pids_of_user, task_count
from state.paths import STATE_DIR_VARIABLE
from state.remains import SHARED_MEMORY

_MIB = 1024 * 1024

STATE_BYTES = 32 * _MIB
"""For the server's files, the queue on the bus, and logs until the largest is rotated."""

OPEN_FILES = 256
"""For each process. An engine's processes have up to 80 at rest; each connection takes one more."""

TASKS_OF_SERVER = 40
"""Processes and threads of `dynamo serve`, circusd, NATS, the fork server and the services that are not workers."""

TASKS_OF_ENGINE = 30
"""Processes and threads of a worker with an engine. There are more where it computes with more cores."""

TASKS_OF_MOCKER = 4


@dataclass(frozen=True)
class Needs:
    """`shared_bytes`: of /dev/shm; None if no process uses it. `tasks`: processes and threads. `memory`: bytes that
    engines take on CPUs; None if that is not known, or on GPUs. `who`: needs all this."""

    shared_bytes: int | None
    tasks: int
    memory: int | None = None
    who: str = "a server"


@dataclass(frozen=True)
class Room:
    """The room that a machine has. None: not limited, or not known.

    `root`: the state folder. `is_writable`: whether it can be made and written. `open_files`: that a process may have.
    `tasks_limit` and `tasks`: processes and threads that this user may have, and has. `memory`: bytes that are free, or
    can be freed at once.
    """

    root: Path
    is_writable: bool
    state_bytes: int | None
    shared_is_writable: bool
    shared_bytes: int | None
    open_files: int | None
    tasks_limit: int | None
    tasks: int
    memory: int | None = None


def check_room(root: Path, templates: Sequence[ServiceTemplate] = (), kind: DeviceKind = "cpu-slot") -> None:
    """Raise UsageError, with figures, if the machine has no room for a server with workers of these services.

    `root`: the state folder, which need not exist yet. `kind`: of the devices.
    """
    require(needs_of(templates, kind), room_of(root))


def check_memory_for_wake(number: int, kv_bytes: int | None, memory: Callable[[], Memory | None]) -> None:
    """Raise MemoryShortError if the KV caches of so many parked workers do not fit any more. `kv_bytes`: that of each;
    None if it is not known, or not in the machine's memory. `memory`: there is now."""
    found = memory()
    if kv_bytes is not None and found is not None:
        needed = number * kv_bytes
        _require_memory(counted(number, "parked worker"), needed, found.free, "end other programs")


def needs_of_workers(
    template: ServiceTemplate, number: int, kind: DeviceKind, engine_bytes: int | None = None
) -> Needs:
    """The needs of so many more workers of a running server. `engine_bytes`: what each takes of the machine's memory.
    Pure."""
    first = needs_of([msgspec.structs.replace(template, workers=number)], kind)
    memory = None if engine_bytes is None else number * engine_bytes
    return Needs(first.shared_bytes, first.tasks - TASKS_OF_SERVER, memory, counted(number, "more worker"))


def needs_of(templates: Sequence[ServiceTemplate], kind: DeviceKind) -> Needs:
    """The needs of a server's first processes. Pure."""
    workers = [template for template in templates if template.role in ENGINE_ROLES]
    engines = [template for template in workers if not template.virtual]
    shares = any(kind == "cpu-slot" or template.devices > 1 for template in engines)
    shared = ENGINE_SHARED_BYTES if shares else 0
    tasks = sum((TASKS_OF_MOCKER if template.virtual else TASKS_OF_ENGINE) * template.workers for template in workers)
    return Needs(shared if engines else None, TASKS_OF_SERVER + tasks)


def require(needs: Needs, room: Room) -> None:
    """Raise UsageError, with figures, if the needs exceed the room; MemoryShortError if that is for memory. Pure."""
    _require_state(room)
    _require_shared_memory(needs, room)
    if room.open_files is not None and room.open_files < OPEN_FILES:
        raise UsageError(
            f"a process may have only {room.open_files} open files (ulimit -n), and needs {OPEN_FILES}",
            "raise the limit, best to 4096 or more: ulimit -n 4096",
        )
    if room.tasks_limit is not None and room.tasks_limit - room.tasks < needs.tasks:
        raise UsageError(
            f"this user may have {room.tasks_limit} processes and threads (ulimit -u) and has {room.tasks}; "
            f"{needs.who} {_need(needs.who)} {needs.tasks} more",
            "raise the limit, or end processes",
        )
    if needs.memory is not None and room.memory is not None:
        fewer = "end other programs, start fewer workers, or give them a smaller KV cache (--kv-cache-memory-bytes)"
        _require_memory(needs.who, needs.memory, room.memory, fewer)


def room_of(root: Path, memory_now: Callable[[], Memory | None] = machine_memory) -> Room:
    """Look at the machine."""
    folder = nearest(root)
    shared_is_writable = os.access(SHARED_MEMORY, os.W_OK | os.X_OK)
    tasks_limit = _task_limit()
    memory = memory_now()
    return Room(
        root,
        folder.is_dir() and os.access(folder, os.W_OK | os.X_OK),
        free_bytes(folder),
        shared_is_writable,
        free_bytes(SHARED_MEMORY) if shared_is_writable else None,
        _limit(resource.RLIMIT_NOFILE),
        tasks_limit,
        0 if tasks_limit is None else _tasks_of_user(),
        None if memory is None else memory.free,
    )


def _require_state(room: Room) -> None:
    elsewhere = f"set {STATE_DIR_VARIABLE} to a folder"
    if not room.is_writable:
        raise UsageError(f"the state folder {room.root} cannot be written", f"{elsewhere} that you can write")
    if room.state_bytes is not None and room.state_bytes < STATE_BYTES:
        raise UsageError(
            f"the disk of the state folder {room.root} has {_shown(room.state_bytes)} left, and a server needs "
            f"{_shown(STATE_BYTES)}",
            f"free some room, or {elsewhere} on another disk",
        )


def _require_memory(who: str, needed: int, free: int, remedy: str) -> None:
    if free < needed:
        raise MemoryShortError(
            f"{size(free)} of memory is free, and {who} {_need(who)} {size(needed)}", remedy, needed - free
        )


def _need(who: str) -> str:
    return "need" if who.endswith("s") else "needs"


def _require_shared_memory(needs: Needs, room: Room) -> None:
    if needs.shared_bytes is None:
        return
    if not room.shared_is_writable:
        raise UsageError(f"{SHARED_MEMORY} cannot be written, and engines need it", "mount a tmpfs there, of mode 1777")
    if room.shared_bytes is not None and room.shared_bytes < needs.shared_bytes:
        raise UsageError(
            f"{SHARED_MEMORY} has {_shown(room.shared_bytes)} left, and vLLM needs {_shown(needs.shared_bytes)}",
            f"enlarge it: mount -o remount,size=1G {SHARED_MEMORY}, or --shm-size 1g for a container",
        )


def _shown(number: int) -> str:
    return f"{number // _MIB} MiB"


def _limit(which: int) -> int | None:
    """The limit to which this process may raise its own."""
    _, hard = resource.getrlimit(which)
    return None if hard == resource.RLIM_INFINITY else hard


def _task_limit() -> int | None:
    # The kernel does not hold root to it.
    return None if os.geteuid() == 0 else _limit(resource.RLIMIT_NPROC)


def _tasks_of_user() -> int:
    return sum(map(task_count, pids_of_user(os.getuid())))
