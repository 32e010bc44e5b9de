"""Which process each watcher has, and whether it is to run, by the statefile. The server alone writes it.

A claim precedes its process. Lease, pid and role are entered as the process announces them (`Registration`), and lease
and pid are taken out when circus tells of its end (`StateRegistry.ended`). In between they stay, whatever is heard: a
process that is silent may live, and while NATS is away nothing is known.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from dynamo_local.core.beats import until_beat
from dynamo_local.core.errors import NotRunningError, StateError
from dynamo_local.core.fleet.view import Change, Happened
from dynamo_local.core.messages.presence import Presence
from dynamo_local.process.groups import kill_group
from dynamo_local.supervisor.server.reports.report import Report, ReportOnce
from dynamo_local.supervisor.upkeep.restarter import RegisteredProcess
from dynamo_local.tasks import finish_in_thread
from state.machine.identity import machine_id
from state.machine.processes import alive, start_time
from state.statefile.model import Component, State
from state.statefile.store import StateStore
from state.statefile.transitions import clear_lease, heard

_EVERY_S = 1.0


class Registration:
    """Keeps the statefile in line with the presences on the bus, of near processes and far ones. `members`: those that
    there are."""

    def __init__(self, store: StateStore, members: Callable[[], list[Presence]], report: Report) -> None:
        self._store = store
        self._members = members
        self._known: dict[str, tuple[str, str]] = {}
        """Lease and role by watcher, as heard last."""
        self._started: dict[str, int | None] = {}
        """By lease, the start time of its process, as long as that is heard of. Its pid may become a stranger's."""
        self._changed = asyncio.Event()
        self._failure = ReportOnce(report)

    def on_change(self, change: Change) -> None:
        """Note a change of the fleet."""
        presence = change.presence
        if change.what is Happened.LEFT:
            self._known.pop(presence.watcher, None)
            self._started.pop(presence.lease, None)
            return
        if presence.machine == machine_id() and presence.lease not in self._started:
            self._started[presence.lease] = start_time(presence.pid)
        if self._known.get(presence.watcher) != (presence.lease, presence.role):
            self._known[presence.watcher] = presence.lease, presence.role
            self._changed.set()

    async def run(self) -> None:
        """Write down each change, and every second what could not be written or was lost, until cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(until_beat(time.monotonic(), _EVERY_S)):
                    await self._changed.wait()
            self._changed.clear()
            await self.write()

    async def write(self) -> None:
        """Write down what is heard now."""

        try:
            # Asked once the update may begin: what was changed meanwhile is not undone by what was heard before.
            await finish_in_thread(lambda: self._store.update(self.with_heard))
        except (NotRunningError, StateError) as error:
            self._failure.note(f"the processes that run cannot be written down: {error}")
        else:
            self._failure.note("")

    def read(self) -> State:
        """Read the statefile, with the processes that are heard now: they may not be written down yet, or not for as
        long as the disk is full. Raises NotRunningError, StateError. Blocks for milliseconds."""
        return self.with_heard(self._store.read())

    def with_heard(self, state: State) -> State:
        """The state with the processes that are heard now."""
        return heard(state, self._members(), self._lives)

    def _lives(self, presence: Presence) -> bool:
        """Whether the presence is that of a process which lives on this machine. One that has ended is heard for a
        while, and for as long as NATS is away."""
        started = self._started.get(presence.lease)
        return started is not None and alive(presence.pid, started)


@dataclass(frozen=True)
class StateRegistry:
    """The statefile as upkeep.restarter.ProcessRegistry."""

    store: StateStore

    async def registered(self, watcher: str) -> RegisteredProcess | None:
        component = await asyncio.to_thread(self._component, watcher)
        if component is None or component.pid is None or component.lease is None:
            return None
        return RegisteredProcess(component.pid, component.lease)

    async def ended(self, watcher: str, pid: int | None, registered: RegisteredProcess | None) -> None:
        """Kill the children of a process that ended, and clear its lease."""
        await asyncio.to_thread(self._record_end, watcher, pid, registered)

    async def wanted(self, watcher: str) -> bool:
        """Whether the watcher has a claim, and no change of it is under way. A change restarts its process itself."""
        component = await asyncio.to_thread(self._component, watcher)
        return component is not None and component.holds and component.phase is None

    def pid_of(self, watcher: str) -> int | None:
        """The pid that the watcher's process has announced; None if it has not. Blocks for milliseconds."""
        try:
            component = self._component(watcher)
        except (NotRunningError, StateError):
            # A server ends its processes even if its statefile cannot be read.
            return None
        return component.pid if component is not None else None

    def _component(self, watcher: str) -> Component | None:
        """The watcher's entry, if its process is one of this node: the pid of another one is that of a stranger."""
        return self.store.read().here.get(watcher)

    def _record_end(self, watcher: str, pid: int | None, registered: RegisteredProcess | None) -> None:
        for group in {pid, registered.pid if registered is not None else None}:
            if group is not None:
                # Children of the process would keep its devices.
                kill_group(group)
        if registered is not None:
            # If the file cannot be written now (a full disk, for example), the next process overwrites the lease.
            with suppress(NotRunningError, StateError):
                self.store.update(lambda state: clear_lease(state, watcher, registered.lease))
