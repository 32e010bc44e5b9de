"""The processes of an engine and their threads, seen from the worker's host: which die, how long they wait for a core,
and which cores they keep to."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dynamo_local.core.process.soft_binding import Binding, ThreadTimes, rebind, shares_between
from dynamo_local.engine.vllm.patches.table import applies
from dynamo_local.process.groups import children_of
from dynamo_local.tasks import TaskGuard
from state.devices.allocation import CPU_CORES_VARIABLE, cores_of_slots
from state.machine.threads import CoreWatch, bind_thread, cores_of, forked_by, threads_of, times_of_all

_log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.25
"""Interval of looks while the engine starts, or has requests."""


class EngineThreads:
    """Threads of all processes that one thread of this process has forked, and that these have forked in turn."""

    def __init__(self) -> None:
        self._forked_in = 0
        self._seen: tuple[float, Mapping[int, ThreadTimes]] = (0.0, {})
        self._waited_s = 0.0

    def forked_here(self) -> None:
        """Note that the engine's processes are forked by the calling thread."""
        self._forked_in = threading.get_native_id()

    def pids(self) -> tuple[int, ...]:
        """EngineCore, then its Workers."""
        found = list(forked_by(os.getpid(), self._forked_in))
        for pid in found:
            # Each of them forks in its main thread.
            found += forked_by(pid, pid)
        return tuple(found)

    def ids(self) -> list[int]:
        return [thread for pid in self.pids() for thread in threads_of(pid)]

    def times(self) -> dict[int, ThreadTimes]:
        return times_of_all(self.pids())

    def waited_s(self) -> float:
        """Time that all threads together have waited for a core since the first call, in seconds."""
        now, (then, before), after = time.monotonic(), self._seen, self.times()
        self._seen = now, after
        if before:
            self._waited_s += shares_between(before, after, now - then).waited_s
        return self._waited_s


class SoftBinding:
    """Keeps an engine to the cores of its slots while they are its own, to others while somebody else computes there.

    `home`: the slots' cores, of which each rank has its own; `watch`: of all that it may use. `busy` tells
    whether the engine has anything to do: nobody looks while it has not.
    """

    def __init__(
        self, threads: EngineThreads, home: frozenset[int], watch: CoreWatch, busy: Callable[[], bool]
    ) -> None:
        self._threads = threads
        self._watch = watch
        self._busy = busy
        self._starting = False
        self._looking: asyncio.Task[None] | None = None
        self._wanted = asyncio.Event()
        self._binding = Binding(home, home)
        self._away: set[frozenset[int]] = set()
        """Sets of cores that the engine has been bound to since it left its own."""
        self._left: dict[int, frozenset[int]] = {}
        """Cores to bind threads to again that were bound to other ones, by thread."""

    def bind_forks(self) -> None:
        """Bind what this process forks from now on to these cores. Processes that those fork inherit them."""
        host = os.getpid()

        def settle() -> None:
            if os.getppid() == host:
                os.sched_setaffinity(0, self._binding.cores)

        os.register_at_fork(after_in_child=settle)

    @contextmanager
    def starting(self, tasks: TaskGuard) -> Iterator[None]:
        """Start the task that looks at the cores. In this context it looks all the time, as with a busy engine."""
        self._starting = True
        self.wake()
        self._looking = tasks.spawn("cores", self._run())
        try:
            yield
        finally:
            self._starting = False

    def wake(self) -> None:
        """Note that the engine has something to do."""
        self._wanted.set()

    def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()

    async def _run(self) -> None:
        while True:
            await self._wanted.wait()
            await asyncio.to_thread(self._look)
            await asyncio.sleep(_LOOK_EVERY_S)
            if not self._starting and not self._busy():
                self._wanted.clear()

    def _look(self) -> None:
        seen = self._watch.look(self._threads.times())
        if seen is None:
            return
        was, self._binding = self._binding, rebind(self._binding, *seen, time.monotonic())
        if was.cores != self._binding.cores:
            self._move()
        elif not self._binding.at_home:
            # Threads that were made meanwhile, or have bound themselves.
            self._leave()

    def _move(self) -> None:
        cores = ",".join(map(str, sorted(self._binding.cores)))
        if self._binding.at_home:
            _log.info("the engine returns to its slot's cores (%s): no other process computes there any more", cores)
            self._return()
        else:
            _log.info("the engine moves to other cores (%s): another process computes on those of its slot", cores)
            self._away.add(self._binding.cores)
            self._leave()

    def _leave(self) -> None:
        home, here = self._binding.home, self._binding.cores
        for thread in self._threads.ids():
            cores = cores_of(thread)
            # One that is bound elsewhere, as what reads KV is, was so on purpose.
            if cores and cores != here and (cores <= home or cores in self._away):
                self._left.setdefault(thread, cores if cores <= home else home)
                bind_thread(thread, here)

    def _return(self) -> None:
        # Twice: a thread that has not returned yet may start another one.
        for _ in range(2):
            for thread in self._threads.ids():
                if thread in self._left or cores_of(thread) in self._away:
                    bind_thread(thread, self._left.get(thread, self._binding.home))
        self._left.clear()
        self._away.clear()


def soft_binding(
    threads: EngineThreads, busy: Callable[[], bool], environ: Mapping[str, str] = os.environ
) -> SoftBinding | None:
    """Make the binding that the worker's device claim asks for. None: the worker has no cores of its own."""
    slots = environ.get(CPU_CORES_VARIABLE)
    if not slots:
        return None
    home = frozenset(core for cores in cores_of_slots(slots) for core in cores)
    return SoftBinding(threads, home, CoreWatch(home | os.sched_getaffinity(0)), busy)


# The processes of an engine, watched by the worker's host: the death of any one is the death of the engine.
#
# vLLM notices these as well. But where several workers share a model, it waits for those that are left, which wait for
# the dead one, up to 9 s before it tells.

_WORKER = b"::Worker"
"""Part of the title of a worker's process of vLLM. (An engine core has other children, too, which come and go.)"""


class EngineProcesses:
    """Watched processes. `on_end` is called when one has ended, unless `close` comes first. Needs a running loop."""

    def __init__(self, pids: Iterable[int], on_end: Callable[[], None]) -> None:
        self.pids = tuple(pids)
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._descriptors: list[int] = []
        for pid in self.pids:
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self._loop.call_soon(on_end)
                continue
            self._descriptors.append(descriptor)
            self._loop.add_reader(descriptor, self._ended)

    async def kill(self, deadline_s: float) -> None:
        """Kill the processes, and wait until they are gone with what they hold. Their children are spared: resource
        trackers among them remove the shared memory of killed processes."""
        self.forget()
        for descriptor in self._descriptors:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        with suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                for descriptor in self._descriptors:
                    await self._gone(descriptor)

    def close(self) -> None:
        """Stop watching, and close the descriptors."""
        self.forget()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()

    def forget(self) -> None:
        """Stop watching: `on_end` is not called any more."""
        for descriptor in self._descriptors:
            self._loop.remove_reader(descriptor)

    def _ended(self) -> None:
        self.forget()
        self._on_end()

    async def _gone(self, descriptor: int) -> None:
        ended = asyncio.Event()
        self._loop.add_reader(descriptor, ended.set)
        try:
            await ended.wait()
        finally:
            self._loop.remove_reader(descriptor)


def watch_processes(core: Any) -> EngineProcesses | None:
    """Watch the engine core of a client of vLLM's, and its workers. When one has ended, the client behaves as if vLLM
    had noticed. None: processes of this version of vLLM cannot be watched, and vLLM notices by itself."""
    if not applies("watching the engine's processes"):
        return None
    from vllm.v1.engine.exceptions import EngineDeadError

    def tell() -> None:
        core.resources.engine_dead = True
        core.outputs_queue.put_nowait(EngineDeadError())

    cores = [process.pid for process in core.resources.engine_manager.processes]
    workers = [pid for parent in cores for pid in children_of(parent) if _WORKER in _title(pid)]
    return EngineProcesses(cores + workers, tell)


def _title(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
