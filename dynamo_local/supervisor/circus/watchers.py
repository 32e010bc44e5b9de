"""Watchers as they are planned, in circus."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from dynamo_local.core.errors import SupervisorError
from dynamo_local.process.ancestry import PARENT_PID_ENV
from dynamo_local.process.death_pipe import DEATH_PIPE_ENV
from dynamo_local.supervisor.circus.adopted import adoption
from dynamo_local.supervisor.circus.client import CircusClient, WatcherSpec
from dynamo_local.supervisor.circus.drain import Drain
from dynamo_local.supervisor.server.plan import WatcherPlan
from dynamo_local.supervisor.server.report import Report
from state.paths import StatePaths
from state.processes import Process


@dataclass(frozen=True)
class Placing:
    """What every watcher of a server has in common. `death_pipe`: address of the pipe on whose end its process ends."""

    paths: StatePaths
    death_pipe: str
    working_dir: Path

    def spec(self, plan: WatcherPlan) -> WatcherSpec:
        """What circus is told of a watcher that is planned."""
        environment = {**plan.environment, DEATH_PIPE_ENV: self.death_pipe}
        return WatcherSpec(plan.name, plan.argv, environment, self.working_dir, self.paths.log_file(plan.name))

    def adopting(self, plan: WatcherPlan, process: Process, circusd_pid: int) -> WatcherSpec:
        """What the circusd of that pid is told of a watcher whose process runs already."""
        spec = self.spec(plan)
        return replace(
            spec,
            argv=adoption(process.pid, process.start_time, plan.argv),
            environment={**spec.environment, PARENT_PID_ENV: str(circusd_pid)},
        )


@dataclass(frozen=True)
class CircusWatchers:
    """The actuator's watchers (actuator_ports.Watchers) in a running circusd. `registered`: see Drain."""

    circus: CircusClient
    placing: Placing
    registered: Callable[[str], int | None]
    report: Report

    async def statuses(self) -> Mapping[str, str]:
        return await self.circus.statuses()

    async def add(self, plan: WatcherPlan) -> None:
        await self.circus.add(self.placing.spec(plan))

    async def end(self, name: str, deadline_s: float) -> None:
        drain = Drain(self.circus, self.report, asyncio.Event(), deadline_s, self.registered)
        if not await drain.end(name):
            raise SupervisorError(f"{name} cannot be killed", "it may hang in a driver; it keeps its devices")

    async def remove(self, name: str) -> None:
        await self.circus.remove(name)
