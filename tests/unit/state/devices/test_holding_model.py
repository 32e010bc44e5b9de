"""Servers and their processes take devices, more of them and fewer, in steps between which anybody may be killed: never
are processes of two servers on one device."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dynamo_local.core.errors import DeviceError
from state.devices.allocation import DEVICES_VARIABLE
from state.devices.holding import Bound, Holder, device, occupy, on_device, take

DEVICES = ("GPU-a", "GPU-b")


ALL = 9
"""More steps than anybody takes."""
STEPS = st.sampled_from([ALL, ALL, ALL, 0, 1, 2, 3])


class Killed(BaseException):
    """The process is gone."""


@dataclass
class Kernel:
    """The kernel's record of bound names. `names`: the pid that has bound each."""

    names: dict[str, int] = field(default_factory=dict)

    def forget(self, pid: int) -> None:
        self.names = {name: owner for name, owner in self.names.items() if owner != pid}


@dataclass
class Name:
    kernel: Kernel
    name: str

    def close(self) -> None:
        self.kernel.names.pop(self.name, None)


class Process:
    """Runs `work` in a thread, up to the next thing that it asks of the kernel each time it is told to `advance`."""

    def __init__(self, kernel: Kernel, pid: int, devices: tuple[str, ...], claim: Process | None = None) -> None:
        self.kernel, self.pid, self.devices, self.claim = kernel, pid, devices, claim
        self.alive, self.over, self.has = True, False, False
        self._go, self._there = threading.Semaphore(0), threading.Semaphore(0)

    def start(self, work: Callable[[Process], object]) -> None:
        def run() -> None:
            try:
                self._wait()
                work(self)
                self.has = True
            except (DeviceError, Killed):
                pass
            self.over = True
            self._there.release()

        threading.Thread(target=run, daemon=True).start()
        self._there.acquire()

    def advance(self, steps: int = 1) -> None:
        while steps and not self.over:
            self._go.release()
            self._there.acquire()
            steps -= 1

    def kill(self) -> None:
        self.alive = self.has = False
        self.kernel.forget(self.pid)
        self.advance()

    def _wait(self) -> None:
        self._there.release()
        self._go.acquire()
        if not self.alive:
            raise Killed

    # What it has of the kernel (state.devices.holding.Names)

    def bind(self, name: str) -> Bound | None:
        self._wait()
        if name in self.kernel.names:
            return None
        self.kernel.names[name] = self.pid
        return Name(self.kernel, name)

    def bound(self) -> tuple[str, ...]:
        self._wait()
        return tuple(self.kernel.names)

    def holder(self, name: str) -> Holder:
        self._wait()
        return Holder(self.kernel.names.get(name))


@pytest.mark.parametrize("before", range(4))
@pytest.mark.parametrize("beside", range(5))
@pytest.mark.parametrize("between", range(4))
def test_a_worker_of_a_killed_server_and_one_of_the_next_are_never_on_one_device(
    before: int, beside: int, between: int
) -> None:
    """The worker has taken so many steps before its server is killed, the next server so many beside it, and the worker
    so many more before that one goes on."""
    kernel, name = Kernel(), DEVICES[:1]
    environ = {DEVICES_VARIABLE: name[0]}
    server, successor = Process(kernel, 1, name), Process(kernel, 2, name)
    late, following = Process(kernel, 3, name), Process(kernel, 4, name)
    server.start(lambda process: take(process, name))
    server.advance(ALL)
    late.start(lambda process: occupy(environ, server.pid, process))
    late.advance(before)
    server.kill()
    successor.start(lambda process: take(process, name))
    successor.advance(beside)
    late.advance(between)
    successor.advance(ALL)
    following.start(lambda process: occupy(environ, successor.pid, process))
    following.advance(ALL)
    late.advance(ALL)
    assert not (late.has and following.has)
    assert following.has == successor.has
    for process in (late, successor, following):
        process.kill()


class Machine(RuleBasedStateMachine):
    """`claims` are what servers hold, or are about to: each has one at first, and more with each that is added."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = Kernel()
        self.pids = itertools.count(1)
        self.claims: list[Process] = []
        self.workers: list[Process] = []

    @rule(devices=st.sampled_from([DEVICES[:1], DEVICES[:1], DEVICES]), steps=STEPS)
    def start_a_server(self, devices: tuple[str, ...], steps: int) -> None:
        self.claim(next(self.pids), devices, steps)

    def claim(self, server: int, devices: tuple[str, ...], steps: int) -> None:
        claim = Process(self.kernel, server, devices)
        claim.start(lambda process: take(process, devices))
        self.claims.append(claim)
        claim.advance(steps)

    def holding(self) -> list[Process]:
        return [claim for claim in self.claims if claim.alive and claim.has]

    @precondition(lambda self: self.holding())
    @rule(data=st.data(), name=st.sampled_from(DEVICES), steps=STEPS)
    def scale_up(self, data: st.DataObject, name: str, steps: int) -> None:
        server = data.draw(st.sampled_from(self.holding())).pid
        if not any(name in claim.devices for claim in self.claims if claim.pid == server and claim.alive):
            self.claim(server, (name,), steps)

    @precondition(lambda self: self.holding())
    @rule(data=st.data(), steps=st.sampled_from([ALL, ALL, 0, 0, 1]))
    def start_a_worker(self, data: st.DataObject, steps: int) -> None:
        claim = data.draw(st.sampled_from(self.holding()))
        worker = Process(self.kernel, next(self.pids), claim.devices, claim)
        environ = {DEVICES_VARIABLE: ",".join(claim.devices)}
        worker.start(lambda process: occupy(environ, claim.pid, process))
        self.workers.append(worker)
        worker.advance(steps)

    def busy(self) -> list[Process]:
        return [process for process in (*self.claims, *self.workers) if process.alive and not process.over]

    @precondition(lambda self: self.busy())
    @rule(data=st.data(), steps=STEPS)
    def go_on(self, data: st.DataObject, steps: int) -> None:
        data.draw(st.sampled_from(self.busy())).advance(steps)

    @precondition(lambda self: any(claim.alive for claim in self.claims))
    @rule(data=st.data(), next_one=st.booleans())
    def kill_a_server(self, data: st.DataObject, next_one: bool) -> None:
        """Kill a server. Its workers die later, in rules of their own. Another server may want its devices at once."""
        killed = data.draw(st.sampled_from([claim for claim in self.claims if claim.alive]))
        for claim in self.claims:
            if claim.pid == killed.pid and claim.alive:
                claim.kill()
        if next_one:
            self.claim(next(self.pids), killed.devices, ALL)

    @precondition(lambda self: any(worker.alive for worker in self.workers))
    @rule(data=st.data())
    def kill_a_worker(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from([worker for worker in self.workers if worker.alive])).kill()

    @precondition(lambda self: self.holding())
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        """Let go of a claim, as a server does with devices that its statefile does not claim any more."""
        claim = data.draw(st.sampled_from(self.holding()))
        starting = [worker for worker in self.workers if worker.claim is claim and worker.alive and not worker.over]
        if not starting and not any(on_device(self.kernel.names, name) for name in claim.devices):
            for name in claim.devices:
                del self.kernel.names[device(name)]
            claim.alive = claim.has = False

    @invariant()
    def no_device_has_processes_of_two_servers(self) -> None:
        for name in DEVICES:
            on_it = {
                worker.claim.pid for worker in self.workers if worker.claim and worker.has and name in worker.devices
            }
            assert len(on_it) <= 1
            assert len([claim for claim in self.holding() if name in claim.devices]) <= 1

    def teardown(self) -> None:
        for process in (*self.claims, *self.workers):
            if process.alive:
                process.kill()


Machine.TestCase.settings = settings(max_examples=150, stateful_step_count=30)
TestMachine = Machine.TestCase
