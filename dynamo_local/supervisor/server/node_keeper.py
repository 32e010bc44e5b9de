"""Keeps the nodes of a cluster in order: ends node servers that hang, replaces workers that were lost with a node."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from dynamo_local.core.errors import DynamoError
from dynamo_local.core.names import endpoint_of, parse_watcher
from dynamo_local.core.planning.actions import AddWorker
from dynamo_local.supervisor.places.clustered import ClusterPlaces, Seen
from dynamo_local.supervisor.server.reports.report import Report, ReportOnce
from state.statefile.model import Component

_LOOK_EVERY_S = 1.0
_LOOK_FOR_ROOM_EVERY_S = 0.25
"""While a worker that was lost is missing, for _SOON_S: a node that joins is counted at once."""

_SOON_S = 60.0
"""After a loss. Later a node that joins is seen by the next look: a large cluster is not asked so often for ever."""

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
    leaks of the graph, "", and of endpoints. `count_devices(seen)`: notes and returns how many devices the workers hold
    or may take. `role(service)`: the role in which its workers start. `replaces`: whether lost workers are added anew,
    as they are where no planner decides. `clock`: seconds.
    """

    places: ClusterPlaces
    add: Callable[[Sequence[AddWorker]], Awaitable[None]]
    reconcile: Callable[[Collection[str]], Awaitable[None]]
    count_devices: Callable[[Seen], Awaitable[float]]
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
    _counts: dict[str, int] = field(default_factory=dict, init=False)
    """By service, the workers that there are to be beside those that are missing."""
    _gone: frozenset[str] = field(default=frozenset(), init=False)
    """Workers that were lost at the last look."""
    _seen: dict[str, Component] = field(default_factory=dict, init=False)
    """The workers that there were at the last look."""
    _adding: str | None = field(default=None, init=False)
    """The service of which a worker is being added."""
    _devices: float = field(default=0.0, init=False)
    _soon_until: float = field(default=-math.inf, init=False)
    _tried_at: float = field(default=-math.inf, init=False)
    _delay_s: float = field(default=0.0, init=False)

    async def keep(self) -> None:
        """Find reservations and processes that were lost, until cancelled."""
        await self._repeat(self.look, _LOOK_EVERY_S, "the nodes are not in order", lambda: True)

    async def keep_replacing(self) -> None:
        """Add the workers that are missing, until cancelled. Beside `keep`: a worker may start for minutes."""
        what = "a worker that was lost is not replaced"
        await self._repeat(self.replace, _LOOK_FOR_ROOM_EVERY_S, what, lambda: not self._missing)

    async def _repeat(
        self, work: Callable[[], Awaitable[None]], every_s: float, what: str, is_over: Callable[[], bool]
    ) -> None:
        """Do the work again and again. Its failures are reported as `what`, until it succeeds and they are over."""
        failure = ReportOnce(self.report)
        while True:
            await asyncio.sleep(every_s)
            try:
                await work()
            except DynamoError as error:
                failure.note(f"{what} for now: {error}")
            else:
                if is_over():
                    failure.note("")

    async def look(self) -> None:
        """Look once. Raises SupervisorError if something cannot be put in order; the next look tries again."""
        places, seen = self.places, await self.places.seen()
        await self._count_devices(seen)
        # At the same time, as the books may change while a silent node is waited for.
        silent, lost = await asyncio.gather(places.silent(seen), places.lost(seen))
        for node in (hanging := self._hanging(silent)):
            self.report.step(f"node {node} does not answer: its node server is ended")
            await places.give_up(node)
        if hanging:
            lost = await places.lost(await places.seen())
        entries = (await places.books.read()).components
        # Not those that somebody has changed since, as who removes a worker does: the cluster may take long to answer.
        still = [one for one in lost if _is_unchanged(one, entries.get(one.watcher_name))]
        lost = (*still, *await self._released_already(entries))
        # Workers of endpoints are replaced by the controller of these.
        own = [entry for entry in lost if not entry.watcher.revision]
        self._heed_orders({name: entry for name, entry in entries.items() if not entry.watcher.revision}, own)
        if self.replaces:
            self._lost |= {one.watcher_name: AddWorker(self.role(one.component), one.component) for one in own}
        try:
            names = {entry.watcher_name for entry in lost} | await places.leaks()
            if names:
                await self.reconcile({endpoint_of(parse_watcher(name).revision) for name in names})
        finally:
            # What is left on one node keeps nobody from replacing what was lost with another.
            await self._note_missing()

    async def replace(self) -> None:
        """Add the workers that are missing, at once when there are more devices, else less and less often. Raises
        SupervisorError if that fails, as it does while there is no room."""
        if self._missing and self.clock() < self._soon_until:
            await self._count_devices(await self.places.seen())
        while self._missing and self.clock() >= self._tried_at + self._delay_s:
            self._tried_at = self.clock()
            self._delay_s = min(_RETRY_MAX_S, max(_LOOK_EVERY_S, 2 * self._delay_s))
            change = self._missing[0]
            self._adding = change.component
            try:
                await self.add([change])
                self._missing.remove(change)
                self._count(change.component, 1)
            finally:
                self._adding = None
            self._delay_s = 0.0

    async def _count_devices(self, seen: Seen) -> None:
        self._devices, before = await self.count_devices(seen), self._devices
        if self._devices > before:
            self._delay_s = 0.0

    async def _released_already(self, entries: Mapping[str, Component]) -> list[Component]:
        """The workers that were not lost at the last look, whose claims were released since, and whose nodes are gone:
        whoever makes a change releases what is lost by then."""
        before, self._seen = self._seen, {name: entry for name, entry in entries.items() if _stays(entry)}
        there = {name for name, entry in entries.items() if entry.holds}
        dropped = [entry for name, entry in before.items() if name not in there | self._gone]
        return [entry for entry in dropped if await self.places.is_gone(entry.node)]

    def _heed_orders(self, entries: Mapping[str, Component], lost: Sequence[Component]) -> None:
        """Forget what is missing of a service whose workers have become more or fewer since the last look, other than
        by a loss or by `replace`: who changed their number meant what there is to be."""
        names = frozenset(entry.watcher_name for entry in lost)
        there = Counter(entry.component for name, entry in entries.items() if name not in names and _stays(entry))
        for entry in lost:
            if entry.watcher_name not in self._gone:
                self._count(entry.component, -1)
        self._gone = names
        for service in {change.component or "" for change in self._missing} - {self._adding}:
            if self._counts.get(service, there[service]) != there[service]:
                self._missing = [change for change in self._missing if change.component != service]
                self.report.step(f"{service}: workers that were lost are not replaced, as their number was changed")
        self._counts = dict(there) | {one: n for one, n in self._counts.items() if one == self._adding}

    def _count(self, service: str | None, more: int) -> None:
        if service in self._counts:
            self._counts[service] += more

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
        still = {one.watcher_name for one in await self.places.lost(await self.places.seen())}
        for name in [name for name in self._lost if name not in still]:
            change = self._lost.pop(name)
            if name not in entries or not entries[name].holds:
                self._missing.append(change)
                self._soon_until = self.clock() + _SOON_S
                # What became of the others until now is no later order.
                self._counts.pop(change.component or "", None)


def _is_unchanged(before: Component, entry: Component | None) -> bool:
    return entry is not None and (entry.holds, entry.phase) == (before.holds, before.phase)


def _stays(entry: Component) -> bool:
    """Whether a worker is among those that there are to be, and neither on its way in nor out."""
    return entry.holds and entry.phase in (None, "restarting")
