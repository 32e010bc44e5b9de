"""Does the faults that are drawn, one after another and several at once, as long as enough workers are left."""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from dynamo_local.core.fleet import PREFILL_ROLE, WORKER_ROLES
from dynamo_local.runtime.presence import FleetWatch
from state.processes import Process
from tests.chaos.cut import Wire
from tests.chaos.faults import OF_ENGINES, OF_THE_BUS, OF_WORKERS, PASSING, Draw, Kind, draw_fault
from tests.chaos.processes import ServerProcesses, children, descendants, send
from tests.chaos.settings import NAMESPACE, ChaosSettings
from tests.chaos.turning import Turning
from tests.chaos.victim import Victim

ROUTER, BUS = f"{NAMESPACE}_Router", f"{NAMESPACE}_Nats"
FIRST_WORKER, FIRST_PREFILL_WORKER = f"{NAMESPACE}_VllmWorker", f"{NAMESPACE}_PrefillWorker"

ALL_ROLES = WORKER_ROLES | {PREFILL_ROLE}
"""Of workers."""

_log = logging.getLogger(__name__)

_NO_TARGET_PAUSE_S = 0.05
_AT_MOST = 10
"""Times as long as was set."""
_BUS = "bus"


@dataclass(frozen=True)
class Rules:
    """Which faults, and what is spared: `least_workers` are left ready and running at any time, and as many prefill
    workers as `least_prefill_workers`; of each kind, a pinned first worker is never ended, only stopped for a while, so
    that it would show if its memory grew."""

    weights: Mapping[Kind, int]
    least_workers: int
    pinned: bool
    least_prefill_workers: int = 1


@dataclass(frozen=True)
class Done:
    """A fault that was done, `at` seconds after the start."""

    at: float
    kind: str
    target: str
    seconds: float


class Injector:
    """Faults in one running server. Without a wire, a victim and roles, those that need them find no target."""

    def __init__(
        self,
        settings: ChaosSettings,
        rules: Rules,
        processes: ServerProcesses,
        fleet: FleetWatch,
        wire: Wire | None = None,
        victim: Victim | None = None,
        turning: Turning | None = None,
        on_fault: Callable[[Done], None] = lambda _: None,
    ) -> None:
        self.done: list[Done] = []
        self.passed_over = 0
        self._settings = settings
        self._rules = rules
        self._processes = processes
        self._fleet = fleet
        self._wire = wire
        self._victim = victim
        self._turning = turning
        self._on_fault = on_fault
        self._rng = random.Random(f"{settings.seed} faults")
        only = [Kind[name] for name in settings.only]
        self._weights = {kind: weight for kind, weight in rules.weights.items() if not only or kind in only}
        self._busy: set[str] = set()
        """Watchers that a lasting fault has its hands on, and `_BUS` while one of those is under way."""
        self._lasting: set[asyncio.Task[None]] = set()
        self._errors: list[BaseException] = []

    @property
    def counts(self) -> dict[str, int]:
        return dict(Counter(fault.kind for fault in self.done))

    async def run(self, enough: Callable[[], bool] = lambda: True) -> None:
        """Faults for as long as is set, and until there were enough; returns when the last of them is over. Raises what
        went wrong with undoing some."""
        begun = time.monotonic()
        seconds = self._settings.seconds
        while (passed := time.monotonic() - begun) < seconds or (not enough() and passed < _AT_MOST * seconds):
            draw = draw_fault(self._rng, self._settings.faults_per_s, self._weights)
            await asyncio.sleep(draw.pause_s)
            target = self._do(draw)
            if target is None:
                self.passed_over += 1
                await asyncio.sleep(_NO_TARGET_PAUSE_S)
            else:
                kind = draw.kind.value
                if target.startswith(FIRST_PREFILL_WORKER):
                    kind = f"prefill {kind}"
                self.done.append(done := Done(time.monotonic() - begun, kind, target, draw.seconds))
                self._on_fault(done)
                _log.info("%s: %s (%.1f s)", target, draw.kind.value, draw.seconds)
        while self._lasting:
            await asyncio.wait(self._lasting)
        if self._errors:
            raise BaseExceptionGroup("faults that could not be undone", self._errors)

    def _do(self, draw: Draw) -> str | None:
        """Returns what it was done to; None if there is nothing that it may be done to now."""
        if draw.kind in OF_THE_BUS:
            return None if _BUS in self._busy else self._trouble_the_bus(draw)
        if draw.kind is Kind.KILL_FRONTEND:
            return "second frontend" if self._victim is not None and self._victim.kill() else None
        processes = self._processes.by_watcher()
        target = self._worker(draw, processes) if draw.kind in OF_WORKERS else ROUTER
        if target is None or target in self._busy or target not in processes:
            return None
        if draw.kind is Kind.TURN_WORKER:
            return self._turn(target, draw.seconds)
        return target if self._hit(draw, processes[target], busy=target) else None

    def _turn(self, target: str, seconds: float) -> str | None:
        if self._turning is None:
            return None
        self._last(self._turning.turn(target, seconds), target)
        return target

    def _trouble_the_bus(self, draw: Draw) -> str | None:
        if draw.kind in (Kind.KILL_BUS, Kind.STOP_BUS):
            process = self._processes.by_watcher().get(BUS)
            return BUS if process is not None and self._hit(draw, process, busy=_BUS) else None
        if self._wire is None:
            return None
        severed = draw.kind is Kind.SEVER_FRONTEND
        self._last(self._wire.sever(draw.seconds / 2) if severed else self._wire.go_dead(draw.seconds), _BUS)
        return "first frontend"

    def _worker(self, draw: Draw, processes: Mapping[str, Process]) -> str | None:
        firsts = (FIRST_WORKER,) if draw.kind is Kind.TURN_WORKER else (FIRST_WORKER, FIRST_PREFILL_WORKER)
        spared = set(firsts) if self._rules.pinned and draw.kind not in PASSING else set()
        workers = {name for name in processes if name.startswith(firsts)} - self._busy - spared
        if not workers:
            return None
        target = sorted(workers)[int(draw.target * len(workers))]
        first, least = FIRST_WORKER, self._rules.least_workers
        if target.startswith(FIRST_PREFILL_WORKER):
            first, least = FIRST_PREFILL_WORKER, self._rules.least_prefill_workers
        left = {name for name in self._unharmed(processes) if name.startswith(first)} - {target}
        return target if len(left) >= least else None

    def _unharmed(self, processes: Mapping[str, Process]) -> set[str]:
        """Workers that could take a request now."""
        ready = {(presence.watcher, presence.pid) for presence in self._fleet.view.routable(ALL_ROLES)}
        return {name for name, process in processes.items() if (name, process.pid) in ready} - self._busy

    def _hit(self, draw: Draw, process: Process, busy: str) -> bool:
        targets = children(process.pid) if draw.kind in OF_ENGINES else [process]
        if draw.kind is Kind.STOP_WORKER:
            targets += descendants(process.pid)
        number = signal.SIGTERM if draw.kind is Kind.DRAIN_WORKER else signal.SIGKILL
        if draw.kind in PASSING:
            number = signal.SIGSTOP
            self._last(_resume(targets, draw.seconds), busy)
        # All of them, not until the first that is there.
        return sum(send(target, number) for target in targets) > 0

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
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._lasting.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._errors.append(error)


async def _resume(processes: list[Process], seconds: float) -> None:
    try:
        await asyncio.sleep(seconds)
    finally:
        for process in processes:
            send(process, signal.SIGCONT)
