"""The sources of a server's events: its own life, the presences of processes, the claims in the statefile, and the
events that other processes publish."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from msgspec.structs import replace

from dynamo_local.bus.nats import Bus
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core.errors import DynamoError
from dynamo_local.core.fleet.view import Change, Happened
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.messages.reports import REQUEST, Event, RequestNews
from dynamo_local.core.names import LOCAL_NODE, shown_node
from dynamo_local.core.request.log import told_id
from dynamo_local.core.subjects import Subjects
from dynamo_local.supervisor.server.reports.event_log import EventLog
from dynamo_local.supervisor.server.reports.report import Report
from state.devices.allocation import noun
from state.paths import StatePaths
from state.statefile.model import Resources, State

Record = Callable[[Event], None]


class ServerEvents:
    """Records the events of one server. `record` is for those that other parts of the server observe. `flush` writes
    those that a full disk did not take. `recent`: the events of the last hour. `listeners` are called with each event
    that is recorded."""

    def __init__(self, paths: StatePaths, report: Report) -> None:
        self._subjects = Subjects(paths.namespace)
        self._log = EventLog(paths.events_file, report)
        self.flush = self._log.flush
        self.recent = self._log.recent
        self.listeners: list[Record] = []
        self.devices = DeviceEvents(self.record)

    def record(self, event: Event) -> None:
        """Record an event."""
        self._log.add(event)
        for listener in self.listeners:
            listener(event)

    @contextmanager
    def of_server(self, target: str) -> Iterator[None]:
        """Record the start of the server, and its end when the context ends."""
        self.record(Event("server", f"starting {target}"))
        try:
            yield
        except DynamoError as error:
            self.record(Event("server", "failed", str(error)))
            raise
        self.record(Event("server", "stopped"))

    def ready(self, what: str) -> None:
        """Record that all services are ready."""
        self.record(Event("server", what))

    def stopping(self) -> None:
        """Record that the server begins to stop."""
        self.record(Event("server", "stopping"))

    async def start(self, bus: Bus, watch: FleetWatch) -> None:
        """Follow the fleet, which the caller starts, and the events that other processes publish."""
        watch.subscribe(PresenceEvents(self.record).on_change)
        await bus.listen(self._subjects.events, Event, self._on_event)
        await bus.listen(self._subjects.request_news, RequestNews, self._on_requests)

    async def _on_event(self, event: Event) -> None:
        self.record(event if event.request is None else replace(event, request=told_id(event.request)))

    async def _on_requests(self, news: RequestNews) -> None:
        for event in news.events:
            self._log.add(event)
        if news.left_out:
            self._log.add(Event(REQUEST, f"{news.left_out} requests are left out", "they come too fast"))


class PresenceEvents:
    """Records starts, role changes, drains and failures of services, by their presences."""

    def __init__(self, record: Record, clock: Callable[[], float] = time.monotonic) -> None:
        self._record = record
        self._clock = clock
        self._last: dict[str, Presence] = {}
        self._drained: dict[str, str] = {}
        """Leases of the processes that drain, by watcher: two signs of it make one event."""

    def on_change(self, change: Change) -> None:
        """Note a change of the fleet."""
        presence = change.presence
        if change.what is Happened.REVOKED:
            self._drains(presence, "its lease is revoked")
        elif change.failed:
            self._record(_of(presence, "death", "engine failed", presence.detail))
        elif change.what is not Happened.LEFT:
            self._compare(presence)

    def _compare(self, presence: Presence) -> None:
        before = self._last.get(presence.watcher)
        self._last[presence.watcher] = presence
        # A process that was silent for a while appears again with the lease that it had.
        if before is None or before.lease != presence.lease:
            self._record(_of(presence, "start", "started"))
            before = None
        elif before.role != presence.role:
            self._record(_of(presence, "role", f"role is {presence.role}", f"it was {before.role}"))
        state = None if before is None else before.state
        if presence.state == "parked" and state != "parked":
            self._record(_of(presence, "park", "parked"))
        elif presence.state == "ready" and state == "parked":
            self._record(_of(presence, "park", "awake"))
        elif presence.state == "ready" and state != "ready":
            self._record(_of(presence, "start", f"ready{self._after(presence)}"))
        elif presence.state == "draining":
            self._drains(presence, presence.detail)

    def _drains(self, presence: Presence, why: str) -> None:
        if self._drained.get(presence.watcher) != presence.lease:
            self._drained[presence.watcher] = presence.lease
            self._record(_of(presence, "drain", "draining", why))

    def _after(self, presence: Presence) -> str:
        began = presence.started_at
        return "" if began is None else f" {max(0.0, self._clock() - began):.1f} s after its start"


class DeviceEvents:
    """Records which devices watchers claim and free, by successive states of the statefile."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._claimed: dict[str, tuple[str, Resources]] = {}
        """Nodes and what is held there, by watcher."""

    def on_state(self, state: State) -> None:
        """Compare the claims with those of the previous call."""
        claimed = {name: (entry.node, entry.resources) for name, entry in state.components.items() if entry.devices}
        for name in sorted(self._claimed.keys() | claimed.keys()):
            before, after = self._claimed.get(name), claimed.get(name)
            if before != after and before is not None:
                self._record(_devices(state, name, "freed", *before))
            if before != after and after is not None:
                self._record(_devices(state, name, "claimed", *after))
        self._claimed = claimed


def _devices(state: State, watcher: str, what: str, node: str, held: Resources) -> Event:
    devices = held.allocated_gpus or ()
    part = "" if held.share == 1 else f"{held.share:g} of "
    named = f"{noun(state.device_kind, len(devices))} {', '.join(map(str, devices))}"
    where = "" if node == LOCAL_NODE else f" of node {shown_node(node)}"
    return Event("device", f"{what} {part}{named}{where}", watcher=watcher, devices=devices)


def _of(presence: Presence, kind: str, what: str, why: str = "") -> Event:
    return Event(kind, what, why, presence.watcher, pid=presence.pid)
