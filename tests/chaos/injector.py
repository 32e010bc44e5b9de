"""Does the faults that are drawn, one after another and several at once, as long as enough workers are left."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from dynamo_local.core.fleet import WORKER_ROLES
from state.processes import Process
from tests.chaos.cut import Wire
from tests.chaos.faults import LEAST_WORKERS, OF_THE_BUS, OF_WORKERS, Draw, Kind, draw_fault
from tests.chaos.frontend import ChaosFrontend
from tests.chaos.processes import ServerProcesses, send
from tests.chaos.settings import NAMESPACE
from tests.chaos.victim import Victim

ROUTER, BUS, PINNED = f"{NAMESPACE}_Router", f"{NAMESPACE}_Nats", f"{NAMESPACE}_VllmWorker"
"""The pinned worker is only ever stopped for a while, so that it would show if its memory grew."""

_NO_TARGET_PAUSE_S = 0.05


@dataclass(frozen=True)
class Done:
    """A fault that was done, `at` seconds after the start."""

    at: float
    kind: str
    target: str
    seconds: float


class Injector:
    """Faults in one running server."""

    def __init__(
        self, processes: ServerProcesses, frontend: ChaosFrontend, wire: Wire, victim: Victim, seed: int
    ) -> None:
        self.done: list[Done] = []
        self.passed_over: Counter[str] = Counter()
        self._processes = processes
        self._frontend = frontend
        self._wire = wire
        self._victim = victim
        self._rng = random.Random(f"{seed} faults")
        self._busy: set[str] = set()
        """Watchers that a fault has its hands on, and "bus" while one of those is under way."""
        self._lasting: set[asyncio.Task[None]] = set()

    @property
    def counts(self) -> dict[str, int]:
        return dict(Counter(fault.kind for fault in self.done))

    async def run(self, seconds: float, faults_per_s: float) -> None:
        """Faults for so long; returns when the last of them is over."""
        begun = time.monotonic()
        while time.monotonic() - begun < seconds:
            draw = draw_fault(self._rng, faults_per_s)
            await asyncio.sleep(draw.pause_s)
            if not self._do(draw, time.monotonic() - begun):
                self.passed_over[draw.kind.value] += 1
                await asyncio.sleep(_NO_TARGET_PAUSE_S)
        while self._lasting:
            await asyncio.wait(self._lasting)

    def last(self, count: int) -> list[str]:
        """The last faults, in words."""
        return [f"{fault.at:.1f} s {fault.target}: {fault.kind}" for fault in self.done[-count:]]

    def _do(self, draw: Draw, at: float) -> bool:
        """Returns whether there was something to do it to."""
        if draw.kind in OF_THE_BUS:
            return self._trouble_the_bus(draw, at)
        if draw.kind is Kind.KILL_FRONTEND:
            return self._victim.kill() and self._note(draw, at, "second frontend")
        processes = self._processes.by_watcher()
        target = self._target(draw, processes)
        if target is None or not self._hit(draw, processes[target]):
            return False
        if draw.kind in (Kind.STOP_WORKER, Kind.STOP_ROUTER):
            self._last(self._resume(processes[target], draw.seconds), target)
        return self._note(draw, at, target)

    def _trouble_the_bus(self, draw: Draw, at: float) -> bool:
        if "bus" in self._busy:
            return False
        match draw.kind:
            case Kind.SEVER_FRONTEND:
                self._last(self._wire.sever(draw.seconds / 2), "bus")
                return self._note(draw, at, "frontend")
            case Kind.SILENCE_FRONTEND:
                self._last(self._wire.go_dead(draw.seconds), "bus")
                return self._note(draw, at, "frontend")
            case _:
                process = self._processes.by_watcher().get(BUS)
                if process is None or not self._hit(draw, process):
                    return False
                if draw.kind is Kind.STOP_BUS:
                    self._last(self._resume(process, draw.seconds), "bus")
                return self._note(draw, at, BUS)

    def _target(self, draw: Draw, processes: Mapping[str, Process]) -> str | None:
        if draw.kind not in OF_WORKERS:
            return ROUTER if ROUTER in processes and ROUTER not in self._busy else None
        candidates = [name for name in sorted(processes) if name.startswith(PINNED) and name not in self._busy]
        if draw.kind is not Kind.STOP_WORKER:
            candidates = [name for name in candidates if name != PINNED]
        if not candidates:
            return None
        target = candidates[int(draw.target * len(candidates))]
        return target if len(self._unharmed(processes) - {target}) >= LEAST_WORKERS else None

    def _unharmed(self, processes: Mapping[str, Process]) -> set[str]:
        """Workers that could take a request now."""
        ready = {(p.watcher, p.pid) for p in self._frontend.fleet.view.routable(WORKER_ROLES)}
        return {name for name, process in processes.items() if (name, process.pid) in ready and name not in self._busy}

    def _hit(self, draw: Draw, process: Process) -> bool:
        match draw.kind:
            case Kind.STOP_WORKER | Kind.STOP_ROUTER | Kind.STOP_BUS:
                return send(process, signal.SIGSTOP)
            case Kind.DRAIN_WORKER:
                return send(process, signal.SIGTERM)
            case _:
                return send(process, signal.SIGKILL)

    async def _resume(self, process: Process, seconds: float) -> None:
        try:
            await asyncio.sleep(seconds)
        finally:
            send(process, signal.SIGCONT)

    def _last(self, fault: Coroutine[Any, Any, None], busy: str) -> None:
        """Let a fault go on, and touch what it is about no more until it is over."""

        async def until_over() -> None:
            try:
                await fault
            finally:
                self._busy.discard(busy)

        self._busy.add(busy)
        task = asyncio.create_task(until_over())
        self._lasting.add(task)
        task.add_done_callback(self._lasting.discard)

    def _note(self, draw: Draw, at: float, target: str) -> bool:
        self.done.append(Done(at, draw.kind.value, target, draw.seconds))
        return True
