"""Servers and their processes take devices, in steps between which anybody may be killed: never are processes of two
servers on one device."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dynamo_local.core.errors import DeviceError
from state.devices import DEVICES_VARIABLE
from state.holding import Bound, Holder, occupy, on_device, take

DEVICES = ("GPU-a", "GPU-b")


STEPS = st.sampled_from([9, 9, 9, 0, 1, 2, 3])
"""Mostly to the end."""


class Killed(BaseException):
    """The process is gone."""


@dataclass
class Kernel:
    """By name: the process that has it."""

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

    def __init__(self, kernel: Kernel, pid: int, devices: tuple[str, ...], server: Process | None = None) -> None:
        self.kernel, self.pid, self.devices, self.server = kernel, pid, devices, server
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

    # What it has of the kernel (state.holding.Names)

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


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.kernel = Kernel()
        self.pids = itertools.count(1)
        self.servers: list[Process] = []
        self.workers: list[Process] = []

    @rule(devices=st.sampled_from([DEVICES[:1], DEVICES[:1], DEVICES]), steps=STEPS)
    def start_a_server(self, devices: tuple[str, ...], steps: int) -> None:
        server = Process(self.kernel, next(self.pids), devices)
        server.start(lambda process: take(process, devices))
        self.servers.append(server)
        server.advance(steps)

    def holding(self) -> list[Process]:
        return [server for server in self.servers if server.alive and server.has]

    @precondition(lambda self: self.holding())
    @rule(data=st.data(), steps=STEPS)
    def start_a_worker(self, data: st.DataObject, steps: int) -> None:
        server = data.draw(st.sampled_from(self.holding()))
        worker = Process(self.kernel, next(self.pids), server.devices, server)
        environ = {DEVICES_VARIABLE: ",".join(server.devices)}
        worker.start(lambda process: occupy(environ, server.pid, process))
        self.workers.append(worker)
        worker.advance(steps)

    def busy(self) -> list[Process]:
        return [process for process in (*self.servers, *self.workers) if process.alive and not process.over]

    @precondition(lambda self: self.busy())
    @rule(data=st.data(), steps=STEPS)
    def go_on(self, data: st.DataObject, steps: int) -> None:
        data.draw(st.sampled_from(self.busy())).advance(steps)

    @precondition(lambda self: any(server.alive for server in self.servers))
    @rule(data=st.data())
    def kill_a_server(self, data: st.DataObject) -> None:
        """Its workers follow when they do."""
        data.draw(st.sampled_from([server for server in self.servers if server.alive])).kill()

    @precondition(lambda self: any(worker.alive for worker in self.workers))
    @rule(data=st.data())
    def kill_a_worker(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from([worker for worker in self.workers if worker.alive])).kill()

    @precondition(lambda self: self.holding())
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        """As a server does with what its statefile does not claim any more: nothing is about to start there."""
        server = data.draw(st.sampled_from(self.holding()))
        starting = [worker for worker in self.workers if worker.server is server and worker.alive and not worker.over]
        if not starting and not any(on_device(self.kernel.names, name) for name in server.devices):
            self.kernel.forget(server.pid)
            server.alive = server.has = False

    @invariant()
    def no_device_has_processes_of_two_servers(self) -> None:
        for name in DEVICES:
            on_it = {id(worker.server) for worker in self.workers if worker.has and name in worker.devices}
            assert len(on_it) <= 1
            holders = [server for server in self.holding() if name in server.devices]
            assert len(holders) <= 1

    def teardown(self) -> None:
        for process in (*self.servers, *self.workers):
            if process.alive:
                process.kill()


Machine.TestCase.settings = settings(max_examples=100, stateful_step_count=40)
TestMachine = Machine.TestCase
