"""Injects the drawn faults, several at a time, while enough workers are left."""

from __future__ import annotations

import asyncio
import logging
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core.fleet.view import PREFILL_ROLE, WORKER_ROLES
from state.machine.processes import Process
from tests.chaos.engines import engine_processes, order, until_gone
from tests.chaos.faults import (
    OF_SERVICES,
    OF_THE_BUS,
    OF_THE_MACHINERY,
    ORDERED,
    PASSING,
    Done,
    Draw,
    Kind,
    draw_fault,
    wanted,
)
from tests.chaos.machinery import Machinery, resume
from tests.chaos.processes import ServerProcesses, descendants, send
from tests.chaos.role_switch import RoleSwitch
from tests.chaos.settings import NAMESPACE, ChaosSettings
from tests.chaos.tcp_proxy import TcpProxy
from tests.chaos.victim import Victim

ROUTER, BUS = f"{NAMESPACE}_Router", f"{NAMESPACE}_Nats"
FIRST_WORKER, FIRST_PREFILL_WORKER = f"{NAMESPACE}_VllmWorker", f"{NAMESPACE}_PrefillWorker"

ALL_ROLES = WORKER_ROLES | {PREFILL_ROLE}
"""Roles of workers."""

_log = logging.getLogger(__name__)

_NO_TARGET_PAUSE_S = 0.05
_AT_MOST = 10
"""Maximum duration of a run, as a multiple of the set one."""
_BUS, _MACHINERY = "bus", "machinery"

_OF_ENGINES = frozenset({Kind.KILL_ENGINE, Kind.KILL_ENGINE_WORKER, Kind.STOP_ENGINE, Kind.HANG_ENGINE})
_OF_LAUNCHERS = frozenset({Kind.KILL_LAUNCHER, Kind.STOP_LAUNCHER})


@dataclass(frozen=True)
class Rules:
    """Weights of the faults, and what they spare. At least `least_workers` workers and `least_prefill_workers` prefill
    workers are left ready at any time. With `pinned`, the first worker of each role is stopped at times but never
    killed, so that a growth of its memory would show."""

    weights: Mapping[Kind, int]
    least_workers: int
    pinned: bool
    least_prefill_workers: int = 1


class Injector:
    """Injects faults into a running server. Faults that need a missing part (proxy, victim, ...) find no target.
    `orders`: the folder for orders to mockers; None: the engines are vLLM's."""

    def __init__(
        self,
        settings: ChaosSettings,
        rules: Rules,
        processes: ServerProcesses,
        fleet: FleetWatch,
        proxy: TcpProxy | None = None,
        victim: Victim | None = None,
        role_switch: RoleSwitch | None = None,
        on_fault: Callable[[Done], None] = lambda _: None,
        machinery: Machinery | None = None,
        orders: Path | None = None,
    ) -> None:
        self.done: list[Done] = []
        self.passed_over = 0
        self._settings = settings
        self._rules = rules
        self._processes = processes
        self._fleet = fleet
        self._proxy = proxy
        self._victim = victim
        self._role_switch = role_switch
        self._on_fault = on_fault
        self._machinery = machinery
        self._orders = orders
        self._rng = random.Random(f"{settings.seed} faults")
        self._weights = {
            kind: weight for kind, weight in rules.weights.items() if wanted(kind, settings.only, settings.without)
        }
        self._busy: set[str] = set()
        """Watchers under a lasting fault; also `_BUS` and `_MACHINERY` while a fault of these lasts."""
        self._lasting: set[asyncio.Task[None]] = set()
        self._errors: list[BaseException] = []

    @property
    def counts(self) -> dict[str, int]:
        return dict(Counter(fault.kind for fault in self.done))

    async def run(self, enough: Callable[[], bool] = lambda: True, served: Callable[[], bool] = lambda: True) -> None:
        """Inject faults for the set time and until `enough`, but no longer than the server is `served`. Returns when
        the last fault is over. Raises BaseExceptionGroup with the errors of undoing faults."""
        begun = time.monotonic()
        while served() and not self._over(time.monotonic() - begun, enough):
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
                self.done.append(done := Done(time.monotonic() - begun, kind, target, draw.seconds, draw.kind))
                self._on_fault(done)
                _log.info("%s: %s (%.1f s)", target, draw.kind.value, draw.seconds)
        while self._lasting:
            await asyncio.wait(self._lasting)
        if self._errors:
            raise BaseExceptionGroup("faults that could not be undone", self._errors)

    def _over(self, passed_s: float, enough: Callable[[], bool]) -> bool:
        settings = self._settings
        if settings.most_faults is not None and len(self.done) >= settings.most_faults:
            return True
        return passed_s >= settings.seconds and (enough() or passed_s >= _AT_MOST * settings.seconds)

    def _do(self, draw: Draw) -> str | None:
        """Inject a fault, and return its target; None if no target is available now."""
        if draw.kind in OF_THE_BUS:
            return None if _BUS in self._busy else self._trouble_the_bus(draw)
        if draw.kind is Kind.KILL_FRONTEND:
            return "second frontend" if self._victim is not None and self._victim.kill() else None
        if draw.kind in OF_THE_MACHINERY:
            return None if _MACHINERY in self._busy else self._trouble_the_machinery(draw)
        processes = self._processes.by_watcher()
        once = f"{NAMESPACE}_{OF_SERVICES[draw.kind]}" if draw.kind in OF_SERVICES else None
        target = self._worker(draw, processes) if once is None else once
        if target is None or target in self._busy or target not in processes:
            return None
        if draw.kind is Kind.SWITCH_ROLE:
            return self._switch_role(target, draw.seconds)
        return target if self._hit(draw, processes[target], busy=target) else None

    def _switch_role(self, target: str, seconds: float) -> str | None:
        if self._role_switch is None:
            return None
        self._last(self._role_switch.switch(target, seconds), target)
        return target

    def _trouble_the_machinery(self, draw: Draw) -> str | None:
        begun = self._machinery.begin(draw) if self._machinery is not None else None
        if begun is None:
            return None
        if begun.lasting is not None:
            self._last(begun.lasting, _MACHINERY)
        return begun.target

    def _trouble_the_bus(self, draw: Draw) -> str | None:
        if draw.kind in (Kind.KILL_BUS, Kind.STOP_BUS):
            process = self._processes.by_watcher().get(BUS)
            return BUS if process is not None and self._hit(draw, process, busy=_BUS) else None
        if self._proxy is None:
            return None
        severed = draw.kind is Kind.SEVER_FRONTEND
        self._last(self._proxy.disconnect(draw.seconds / 2) if severed else self._proxy.stall(draw.seconds), _BUS)
        return "first frontend"

    def _worker(self, draw: Draw, processes: Mapping[str, Process]) -> str | None:
        firsts = (FIRST_WORKER,) if draw.kind is Kind.SWITCH_ROLE else (FIRST_WORKER, FIRST_PREFILL_WORKER)
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
        """Return the workers that could take a request now."""
        ready = {(presence.watcher, presence.pid) for presence in self._fleet.view.routable(ALL_ROLES)}
        return {name for name, process in processes.items() if (name, process.pid) in ready} - self._busy

    def _hit(self, draw: Draw, process: Process, busy: str) -> bool:
        if draw.kind in ORDERED and self._orders is not None:
            self._last(order(self._orders, process, draw.kind), busy)
            return True
        targets = self._targets(draw.kind, process, busy)
        number = signal.SIGTERM if draw.kind is Kind.DRAIN_WORKER else signal.SIGKILL
        if draw.kind in PASSING or draw.kind is Kind.HANG_ENGINE:
            number = signal.SIGSTOP
        # sum, not any: all targets must be signalled.
        hit = sum(send(target, number) for target in targets) > 0
        if hit and draw.kind in PASSING:
            self._last(resume(targets, draw.seconds), busy)
        elif hit and draw.kind is Kind.HANG_ENGINE:
            self._last(until_gone(process), busy)
        return hit

    def _targets(self, kind: Kind, process: Process, watcher: str) -> list[Process]:
        if kind in _OF_ENGINES:
            return engine_processes(process, kind)
        if kind in _OF_LAUNCHERS:
            launcher = self._processes.launchers().get(watcher)
            return [] if launcher is None else [launcher]
        return [process, *descendants(process.pid)] if kind is Kind.STOP_WORKER else [process]

    def _last(self, fault: Coroutine[Any, Any, None], busy: str) -> None:
        """Run a lasting fault in the background, and spare its target until it is over."""

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
