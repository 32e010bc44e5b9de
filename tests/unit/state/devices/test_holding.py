"""Names on the real machine: whoever has one is found, and nobody has it once its last process is gone."""

from __future__ import annotations

import os
import secrets
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable

import pytest

from dynamo_local.core.errors import DeviceError
from state.devices.allocation import DEVICES_VARIABLE, Device, Inventory, cpu_slots
from state.devices.holding import (
    NAMES,
    HeldError,
    Holder,
    device,
    held,
    held_elsewhere,
    holder_of,
    introduce,
    mark,
    occupy,
    on_device,
    take,
)
from tests.unit.state.builders import python

SERVER = """
import socket, sys, time
from state.devices.holding import NAMES, introduce, take
held = take(NAMES, {names!r})
print("ready", flush=True)
while True:
    for bound in held.values():
        bound.setblocking(True)
        introduce(bound, "other")
"""
WORKER = """
import os, sys
from state.devices.holding import mark
marks = mark({{"DYN_DEVICES": {name!r}}})
if os.fork() == 0:
    sys.stdin.readline()
    os._exit(0)
print("ready", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def name() -> str:
    """The name of a device that no other test has."""
    return f"GPU-{secrets.token_hex(8)}"


def gpus(*names: str) -> Inventory:
    return Inventory("gpu", tuple(Device(index, "gpu", "H100", uuid=name) for index, name in enumerate(names)))


def is_free(name: str) -> bool:
    try:
        for bound in take(NAMES, [name]).values():
            bound.close()
    except HeldError:
        return False
    return True


def test_a_device_has_one_holder_until_that_lets_go(name: str) -> None:
    (mine,) = take(NAMES, [name]).values()
    with pytest.raises(HeldError):
        take(NAMES, [name])
    mine.close()
    assert is_free(name)


def test_several_are_taken_all_or_none(name: str) -> None:
    last = take(NAMES, [f"{name}-9"])
    with pytest.raises(HeldError) as refused:
        take(NAMES, [f"{name}-1", f"{name}-9"])
    assert refused.value.name == f"{name}-9"
    assert is_free(f"{name}-1")
    assert not is_free(f"{name}-9")
    last[f"{name}-9"].close()


def test_a_holder_says_who_it_is_and_the_kernel_confirms_it(name: str) -> None:
    with python(SERVER.format(names=[name])) as server:
        (holder,) = held_elsewhere(gpus("GPU-unknown", name), os.getpid()).values()
        assert (holder.pid, holder.namespace, holder.left_over) == (server.pid, "other", False)
        assert str(holder) == f"the server of namespace other (pid {server.pid}, user {holder.user})"
        # Our own device is not somebody else's.
        assert held_elsewhere(gpus(name), server.pid) == {}
        assert held_elsewhere(gpus(name), os.getpid(), mine=[0]) == {}
    assert is_free(name)


def test_a_holder_that_says_nothing_is_named_by_the_kernel(name: str) -> None:
    (mine,) = take(NAMES, [name]).values()
    holder = holder_of(NAMES, name, NAMES.bound())
    assert holder is not None
    assert (holder.pid, holder.namespace) == (os.getpid(), None)
    assert str(holder).startswith(f"a process that says no more (pid {os.getpid()}")
    mine.close()


def test_a_name_that_somebody_only_has_is_not_to_be_had_either(name: str) -> None:
    with socket.socket(socket.AF_UNIX) as squatting:
        squatting.bind(f"\0{device(name)}")
        assert held(gpus(name)) == {0}
        assert holder_of(NAMES, name, NAMES.bound()) == Holder()
        with pytest.raises(HeldError):
            take(NAMES, [name])


def test_who_is_stopped_is_named_nevertheless(name: str) -> None:
    with python(SERVER.format(names=[name])) as server:
        server.send_signal(signal.SIGSTOP)
        holder = holder_of(NAMES, name, NAMES.bound())
        assert holder is not None
        assert (holder.pid, holder.namespace) == (server.pid, None)


def test_a_killed_process_is_on_its_device_until_its_forks_are_gone(name: str) -> None:
    with python(WORKER.format(name=name)) as worker:
        worker.kill()
        worker.wait()
        # The fork has it still.
        assert not is_free(name)
        (holder,) = held_elsewhere(gpus(name), os.getpid()).values()
        assert (holder.pid, holder.left_over) == (worker.pid, True)
        assert "a process of a server that has ended" in str(holder)
        with pytest.raises(HeldError):
            take(NAMES, [name])
    # Its pipe is closed, so it ends.
    _eventually(lambda: is_free(name))


def test_a_program_that_is_started_does_not_inherit_a_device(name: str) -> None:
    marks = mark({DEVICES_VARIABLE: name})
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False):
        for bound in marks:
            bound.close()
        _eventually(lambda: is_free(name))


def test_a_process_goes_on_a_device_only_while_its_server_holds_it(name: str) -> None:
    environ = {DEVICES_VARIABLE: f"{name}-1,{name}-2"}
    with pytest.raises(DeviceError, match="is not held by this process's server"):
        occupy(environ, os.getpid())
    held_now = take(NAMES, [f"{name}-1", f"{name}-2"])
    with pytest.raises(DeviceError):
        occupy(environ, os.getppid())
    assert not on_device(NAMES.bound(), f"{name}-1")
    marks = occupy(environ, os.getpid())
    assert len(marks) == 2
    for bound in (*held_now.values(), *marks):
        bound.close()
    assert is_free(f"{name}-1")
    assert is_free(f"{name}-2")


def test_a_process_without_devices_of_its_own_asks_nobody() -> None:
    assert occupy({}, 1) == []


def test_many_may_ask_a_server_that_answers(name: str) -> None:
    (mine,) = take(NAMES, [name]).values()
    assert isinstance(mine, socket.socket)
    for _ in range(500):
        with socket.socket(socket.AF_UNIX) as asking:
            asking.connect(f"\0{device(name)}")
        introduce(mine, "dynamo")
    mine.close()


def test_slots_that_share_cores_are_nobodys() -> None:
    assert cpu_slots([0, 1], 2).machine_names((0, 1)) == ()
    assert cpu_slots([0, 1], 2, exclusive=True).machine_names((1,)) == ("core-1",)
    assert held_elsewhere(cpu_slots([0, 1], 2), 1) == {}


def _eventually(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        select.select([], [], [], 0.01)
    raise AssertionError("somebody has it still")


def test_processes_of_one_server_share_a_device_and_each_is_on_it_until_it_is_gone(name: str) -> None:
    environ = {DEVICES_VARIABLE: name}
    (server,) = take(NAMES, [name]).values()
    (first,), (second,) = occupy(environ, os.getpid()), occupy(environ, os.getpid())
    assert len(on_device(NAMES.bound(), name)) == 2
    first.close()
    server.close()
    assert not is_free(name)
    second.close()
    assert is_free(name)


def test_a_core_that_two_slots_of_a_server_share_is_not_held_by_others() -> None:
    class Taken:
        def bind(self, name: str) -> None:
            raise AssertionError

        def bound(self) -> list[str]:
            return [device("core-0"), device("core-1")]

        def holder(self, name: str) -> Holder:
            raise AssertionError

    inventory = cpu_slots([0, 1], 4, exclusive=True)
    # Slots 0 and 2 have core 0.
    assert held(inventory, {0}, Taken()) == {1, 3}
    assert held(inventory, {0, 1}, Taken()) == frozenset()
