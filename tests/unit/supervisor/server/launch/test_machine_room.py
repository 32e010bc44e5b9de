"""Refusals of a server for which the machine has no room."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dynamo_local.core.errors import UsageError
from dynamo_local.core.sizing.memory import ENGINE_SHARED_BYTES
from dynamo_local.supervisor.server.launch.machine_room import (
    OPEN_FILES,
    STATE_BYTES,
    TASKS_OF_ENGINE,
    Needs,
    Room,
    check_room,
    needs_of,
    needs_of_workers,
    require,
    room_of,
)
from dynamo_local.supervisor.server.launch.templates import ServiceTemplate

MIB = 1024 * 1024
ROOM = Room(Path("/home/u/.dynamo/state"), True, STATE_BYTES, True, 320 * MIB, OPEN_FILES, 200, 100)
NEEDS = Needs(320 * MIB, 100)


def template(workers: int, *, devices: int = 1, virtual: bool = False, role: str = "decode") -> ServiceTemplate:
    return ServiceTemplate("W", role, (), {}, devices, workers, virtual)


def test_room_that_just_suffices_is_enough() -> None:
    require(NEEDS, ROOM)
    require(NEEDS, Room(ROOM.root, True, None, True, None, None, None, 0))


@pytest.mark.parametrize(
    ("room", "said"),
    [
        (
            replace(ROOM, is_writable=False),
            "the state folder /home/u/.dynamo/state cannot be written; set DYN_LOCAL_STATE_DIR to a folder that you "
            "can write",
        ),
        (
            replace(ROOM, state_bytes=STATE_BYTES - 1),
            "the disk of the state folder /home/u/.dynamo/state has 31 MiB left, and a server needs 32 MiB; free some "
            "room, or set DYN_LOCAL_STATE_DIR to a folder on another disk",
        ),
        (
            replace(ROOM, shared_is_writable=False),
            "/dev/shm cannot be written, and engines need it; mount a tmpfs there, of mode 1777",
        ),
        (
            replace(ROOM, shared_bytes=64 * MIB),
            "/dev/shm has 64 MiB left, and vLLM needs 320 MiB; enlarge it: mount -o remount,size=1G /dev/shm, or "
            "--shm-size 1g for a container",
        ),
        (
            replace(ROOM, open_files=64),
            "a process may have only 64 open files (ulimit -n), and needs 256; raise the limit, best to 4096 or more: "
            "ulimit -n 4096",
        ),
        (
            replace(ROOM, tasks=150),
            "this user may have 200 processes and threads (ulimit -u) and has 150; a server needs 100 more; raise the "
            "limit, or end processes",
        ),
    ],
)
def test_what_is_short_is_said_with_figures(room: Room, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        require(NEEDS, room)
    assert str(caught.value) == said


def test_shared_memory_is_needed_by_engines_only() -> None:
    services = [template(4, role="frontend"), template(8, virtual=True)]
    assert needs_of(services, "cpu-slot").shared_bytes is None
    require(Needs(None, 1), replace(ROOM, shared_is_writable=False, shared_bytes=None))


def test_on_gpus_only_the_ranks_of_an_engine_share_memory() -> None:
    assert needs_of([template(2)], "gpu").shared_bytes == 0
    assert needs_of([template(1), template(1, devices=2)], "gpu").shared_bytes == ENGINE_SHARED_BYTES
    assert needs_of([template(2)], "cpu-slot").shared_bytes == ENGINE_SHARED_BYTES


def test_each_worker_needs_more() -> None:
    one, two = (needs_of([template(workers)], "cpu-slot") for workers in (1, 2))
    assert two.tasks > one.tasks
    assert needs_of([template(2, virtual=True)], "cpu-slot").tasks < two.tasks


def test_a_folder_that_does_not_exist_yet_is_judged_by_the_one_above(tmp_path: Path) -> None:
    room = room_of(tmp_path / "not" / "yet")
    assert room.is_writable
    assert room.state_bytes is not None
    assert not (tmp_path / "not").exists()
    (tmp_path / "file").touch()
    assert not room_of(tmp_path / "file" / "state").is_writable


def test_a_low_limit_of_open_files_is_seen(tmp_path: Path) -> None:
    code = (
        "import resource, sys; from pathlib import Path\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        "from dynamo_local.supervisor.server.launch.machine_room import room_of\n"
        "print(room_of(Path(sys.argv[1])).open_files)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout == "64\n"


def test_this_machine_has_room_for_a_server_without_workers(tmp_path: Path) -> None:
    check_room(tmp_path)


def test_more_workers_of_a_running_server_need_memory_but_no_second_server() -> None:
    needs = needs_of_workers(template(1), 2, "cpu-slot", 3 * 1024 * MIB)
    assert needs.memory == 6 * 1024 * MIB
    assert needs.tasks == 2 * TASKS_OF_ENGINE
    assert needs_of_workers(template(1), 2, "gpu").memory is None
    roomy = replace(ROOM, tasks=0, memory=needs.memory)
    require(needs, roomy)
    require(needs, replace(roomy, memory=None))
    with pytest.raises(UsageError) as caught:
        require(needs, replace(roomy, memory=5 * 1024 * MIB))
    assert caught.value.cause == "5.0 GiB of memory is free, and 2 more workers need 6.0 GiB"
    with pytest.raises(UsageError, match="has 190; 1 more worker needs 30 more"):
        require(needs_of_workers(template(1), 1, "gpu"), replace(ROOM, tasks=190))
