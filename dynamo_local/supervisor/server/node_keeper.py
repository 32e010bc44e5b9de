"""Keeps the nodes of a cluster in order: ends node servers that hang, replaces workers that were lost with a node."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dynamo_local.core.errors import DynamoError
from dynamo_local.core.planning.actions import AddWorker
from dynamo_local.supervisor.places.clustered import ClusterPlaces
from dynamo_local.supervisor.server.reports.report import Report, ReportOnce

_LOOK_EVERY_S = 1.0
_SILENT_LOOKS = 3
"""A node server that is silent at so many looks, of whose workers nothing is heard either, is ended by the cluster."""

_HEARD_SILENT_S = 60.0
"""So is one that is silent for so long although its workers are heard: it hangs, and no change of them comes to an
end."""

_RETRY_MAX_S = 30.0
"""Longest wait between two attempts to add a worker that was lost with its node, while no device comes."""


@dataclass
class NodeKeeper:
    """The keeper of the nodes of one server.

    `add`: adds workers, and waits until they are ready; raises SupervisorError. `reconcile`: releases what is lost or
    leaks. `count_devices`: notes and returns how many devices the workers hold or may take. `role(service)`: the role
    in which its workers start. `replaces`: whether lost workers are added anew, as they are where no planner decides.
    `clock`: seconds.
    """

    places: ClusterPlaces
    add: Callable[[Sequence[AddWorker]], Awaitable[None]]
    reconcile: Callable[[], Awaitable[None]]
    count_devices: Callable[[], Awaitable[float]]
    role: Callable[[str], str]
    replaces: bool
    report: Report
    clock: Callable[[], float] = time.monotonic
    _silent: dict[str, tuple[int, float]] = field(default_factory=dict, init=False)
    """Nodes that are silent: at how many looks, and since when."""
    _lost: dict[str, AddWorker] = field(default_factory=dict, init=False)
    """Workers that were lost with their nodes, and whose claims are to be released."""
    _missing: list[AddWorker] = field(default_factory=list, init=False)
    """Workers that were lost with their nodes, and for which there is no place yet."""
    _devices: float = field(default=0.0, init=False)
    _tried_at: float = field(default=-math.inf, init=False)
    _delay_s: float = field(default=0.0, init=False)

    async def keep(self) -> None:
        """Find reservations and processes that were lost, until cancelled."""
        failure = ReportOnce(self.report)
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            try:
                await self.look()
            except DynamoError as error:
                failure.note(f"the nodes are not in order for now: {error}")
            else:
                failure.note("")

    async def keep_replacing(self) -> None:
        """Add the workers that are missing, until cancelled. Beside `keep`: a worker may start for minutes."""
        failure = ReportOnce(self.report)
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            try:
                await self.replace()
            except DynamoError as error:
                failure.note(f"a worker that was lost is not replaced for now: {error}")
            else:
                if not self._missing:
                    failure.note("")

    async def look(self) -> None:
        """Look once. Raises SupervisorError if something cannot be put in order; the next look tries again."""
        places = self.places
        self._devices, before = await self.count_devices(), self._devices
        if self._devices > before:
            self._delay_s = 0.0
        for node in self._hanging(await places.silent()):
            self.report.step(f"node {node} does not answer: its node server is ended")
            await places.give_up(node)
        lost = await places.lost()
        if self.replaces:
            own = (entry for entry in lost if not entry.watcher.revision)
            self._lost |= {one.watcher_name: AddWorker(self.role(one.component), one.component) for one in own}
        try:
            if lost or await places.leaks():
                await self.reconcile()
        finally:
            # What is left on one node keeps nobody from replacing what was lost with another.
            await self._note_missing()

    async def replace(self) -> None:
        """Add the workers that are missing, at once when there are more devices, else less and less often. Raises
        SupervisorError if that fails, as it does while there is no room."""
        while self._missing and self.clock() >= self._tried_at + self._delay_s:
            self._tried_at = self.clock()
            self._delay_s = min(_RETRY_MAX_S, max(_LOOK_EVERY_S, 2 * self._delay_s))
            await self.add(self._missing[:1])
            self._missing.pop(0)
            self._delay_s = 0.0

    def _hanging(self, silent: Mapping[str, bool]) -> list[str]:
        """The nodes that are silent for too long, of those that are silent at this look, each with whether a worker is
        heard."""
        now = self.clock()
        known = {node: self._silent.get(node, (0, now)) for node in silent}
        self._silent = {node: (looks + 1, since) for node, (looks, since) in known.items()}
        return [
            node
            for node, (looks, since) in self._silent.items()
            if (now - since >= _HEARD_SILENT_S if silent[node] else looks >= _SILENT_LOOKS)
        ]

    async def _note_missing(self) -> None:
        """Count as missing those that were lost and are released by now."""
        if not self._lost:
            return
        entries = (await self.places.books.read()).components
        still = {one.watcher_name for one in await self.places.lost()}
        for name in [name for name in self._lost if name not in still]:
            change = self._lost.pop(name)
            if name not in entries or not entries[name].holds:
                self._missing.append(change)
