"""What `dynamo top` shows, as data, and the session that keeps it current."""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType

import msgspec
from msgspec.structs import replace

from dynamo_local.control.descriptions import FleetLook
from dynamo_local.core.beats import BEAT_S
from dynamo_local.core.errors import DynamoError
from dynamo_local.core.fleet.view import ENGINE_ROLES, FRONTEND_ROLE, PREFILL_ROLE, WORKER_ROLES, routers_of
from dynamo_local.core.messages.endpoints import Board, EndpointView
from dynamo_local.core.messages.presence import Counts, Load, MigrationCounts, Presence, as_received
from dynamo_local.core.messages.reports import EndpointReport, Event, PlannerReport
from dynamo_local.core.messages.work import QueueLength
from dynamo_local.core.migration.protocol import migrations_of
from dynamo_local.core.names import FIRST_OF_MAIN, Revision, endpoint_of
from dynamo_local.monitor.metrics import Snapshot
from dynamo_local.monitor.scraping import FrontendFigures, FrontendReader, Rates, ReadFigures
from dynamo_local.tasks import TaskGuard

SHOWN_EVENTS = 6

_NOT_SHOWN = frozenset({"device", "planner"})
"""Kinds of events that are seen elsewhere on the screen."""

_NUMBER = re.compile(r"\d+(?:\.\d+)?")

REVOKED = "revoked"
"""State that is shown for a process whose lease is revoked: it gets no more work."""

REFRESH_S = 1.0
FIRST_LOOK_S = 2.2
"""Time before a view that is shown only once, in seconds: rates need two readings of a counter."""
_KEPT_EVENTS = 200
"""Events in memory. Repeated ones are counted among these."""
_READ_SHARE = 20
"""A frontend is left alone for so many times as long as it took to answer."""


class WorkerRow(msgspec.Struct, frozen=True, kw_only=True):
    """A worker. `tokens_per_s`: rate of generated tokens, in the prefill role of computed prompt tokens."""

    watcher: str
    role: str
    revision: str = ""
    """The endpoint's revision that it serves, such as "chat@2"; "main@1" for the graph's own model."""
    state: str
    detail: str
    running: int | None
    waiting: int | None
    kv_usage: float | None
    kv_pinned: float | None
    tokens_per_s: float | None
    age_s: float | None


class ProcessRow(msgspec.Struct, frozen=True, kw_only=True):
    """A process without an engine."""

    watcher: str
    role: str
    state: str
    detail: str
    age_s: float | None


class EndpointRow(msgspec.Struct, frozen=True, kw_only=True):
    """An endpoint. `revision`: the one that answers, or is to answer first. `ready` and `wanted`: numbers of workers.

    `tokens_per_s` and `kv_usage`: sum and mean of what is known of its workers without the prefill workers. An adapter
    has no workers of its own: `adapter_of` is the endpoint that serves it.
    """

    name: str
    revision: str
    state: str
    reason: str
    ready: int
    wanted: int
    ready_prefill: int
    wanted_prefill: int
    adapter_of: str | None
    tokens_per_s: float | None
    kv_usage: float | None
    frontend: FrontendFigures | None
    queue: QueueLength | None
    planned: tuple[EndpointReport, ...] = ()
    """What the planner decides about its workers, by role; none of those whose number is fixed."""
    parked: int = 0
    """Number of parked workers."""
    last: str = ""
    """What was done to it last by itself: parked, woken and so on, and why."""
    last_at: float = 0.0
    """Time of this (Unix time, s)."""


class EventRow(msgspec.Struct, frozen=True, kw_only=True):
    """An event, or several of one kind and watcher in a row: the last of them, at `time` (Unix time, s)."""

    time: float
    watcher: str
    what: str
    times: int = 1
    endpoint: str = ""


class RoutingRow(msgspec.Struct, frozen=True, kw_only=True):
    """What the routers have done in the last seconds. Shares are of the tokens of assigned requests' contexts; None:
    there were none."""

    policy: str
    assigned_per_s: float | None
    cached_share: float | None
    """Expected to be cached at the chosen workers."""
    pull_share: float | None
    """To be pulled from other workers."""


class TopView(msgspec.Struct, frozen=True, kw_only=True):
    """The whole contents. None: unknown, or the graph has no such part. `connected`: whether NATS can be reached."""

    namespace: str
    workers: tuple[WorkerRow, ...]
    processes: tuple[ProcessRow, ...]
    queue: QueueLength | None
    frontend: FrontendFigures | None
    planner: PlannerReport | None
    migrations: MigrationCounts | None
    routing: RoutingRow | None = None
    events: tuple[EventRow, ...] = ()
    """The last events, the newest last."""
    connected: bool = True
    endpoints: tuple[EndpointRow, ...] = ()


def note_counts(rates: Rates, presence: Presence, now: float) -> None:
    """Add the counters of a presence to `rates`."""
    counts = presence.counts
    for name in Counts.__struct_fields__ if counts is not None else ():
        value = getattr(counts, name)
        if isinstance(value, int):
            rates.note((presence.lease, name), value, now)


def recent(events: Iterable[Event], number: int = SHOWN_EVENTS) -> tuple[EventRow, ...]:
    """Return the last events as rows. Of several in a row that differ in numbers and requests alone, the last is
    shown, with their number."""
    rows: list[EventRow] = []
    previous: tuple[str, ...] = ()
    for event in events:
        if event.kind in _NOT_SHOWN:
            continue
        gist = event.kind, event.watcher, event.endpoint, _NUMBER.sub("#", event.what)
        times = rows.pop().times + 1 if gist == previous else 1
        what = event.what if event.request is None or times > 1 else f"{event.request} {event.what}"
        row = EventRow(time=event.time, watcher=event.watcher, what=what, times=times, endpoint=event.endpoint)
        rows.append(row)
        previous = gist
    return tuple(rows[-number:])


def view_of(
    namespace: str,
    snapshot: Snapshot,
    rates: Rates,
    figures: ReadFigures | None,
    events: tuple[EventRow, ...] = (),
    *,
    connected: bool = True,
    board: Board | None = None,
    queues: Mapping[str, QueueLength] = MappingProxyType({}),
) -> TopView:
    """Return the view at the snapshot's moment. `queues`: lengths of the prefill queues of endpoints, by revision."""
    workers = [member for member in snapshot.members if member.role in ENGINE_ROLES]
    others = [member for member in snapshot.members if member.role not in ENGINE_ROLES]
    rows = tuple(_worker(presence, snapshot, rates) for presence in workers)
    models = {} if figures is None else figures.models
    endpoints = () if board is None else board.endpoints
    return TopView(
        namespace=namespace,
        workers=rows,
        processes=tuple(_process(presence, snapshot) for presence in others),
        queue=snapshot.queue,
        frontend=None if figures is None else figures.whole,
        planner=snapshot.planner,
        migrations=migrations_of(snapshot.members),
        routing=_routing(snapshot, rates),
        events=events,
        connected=connected,
        endpoints=tuple(_endpoint(view, rows, models, queues, snapshot.planner) for view in endpoints),
    )


def _routing(snapshot: Snapshot, rates: Rates) -> RoutingRow | None:
    routers = routers_of(snapshot.members)
    if not routers:
        return None

    def grown(name: str) -> float | None:
        each = [rates.growth((presence.lease, name), snapshot.at) for presence, _ in routers]
        known = [growth for growth in each if growth is not None]
        return sum(known) if known else None

    speeds = [rates.rate((presence.lease, "assigned"), snapshot.at) for presence, _ in routers]
    known = [speed for speed in speeds if speed is not None]
    tokens, cached, pulled = grown("routed_tokens"), grown("predicted_tokens"), grown("pull_tokens")
    return RoutingRow(
        policy=", ".join(sorted({counts.policy for _, counts in routers if counts.policy is not None})),
        assigned_per_s=sum(known) if known else None,
        cached_share=cached / tokens if tokens and cached is not None else None,
        pull_share=pulled / tokens if tokens and pulled is not None else None,
    )


def _endpoint(
    view: EndpointView,
    workers: Iterable[WorkerRow],
    models: Mapping[str, FrontendFigures],
    queues: Mapping[str, QueueLength],
    planner: PlannerReport | None,
) -> EndpointRow:
    spec, status = view.spec, view.status
    mine = [row for row in workers if endpoint_of(row.revision) == spec.name and row.role in WORKER_ROLES]
    speeds = [row.tokens_per_s for row in mine if row.tokens_per_s is not None]
    usages = [row.kv_usage for row in mine if row.kv_usage is not None]
    lengths = [length for revision, length in queues.items() if endpoint_of(revision) == spec.name]
    return EndpointRow(
        name=spec.name,
        revision=str(Revision(spec.name, status.revision)),
        state=status.state,
        reason=status.reason,
        ready=status.ready,
        wanted=status.wanted,
        ready_prefill=status.ready_prefill,
        wanted_prefill=status.wanted_prefill,
        adapter_of=spec.adapter_of,
        tokens_per_s=sum(speeds) if speeds else None,
        kv_usage=sum(usages) / len(usages) if usages else None,
        frontend=models.get(spec.name),
        queue=_together(lengths),
        planned=() if planner is None else tuple(each for each in planner.endpoints if _is_planned(each, spec.name)),
        parked=status.parked,
        last=view.history.last,
        last_at=view.history.last_at,
    )


def _is_planned(report: EndpointReport, endpoint: str) -> bool:
    return report.endpoint == endpoint and report.wanted is not None


def _together(lengths: Sequence[QueueLength]) -> QueueLength | None:
    """The jobs of several revisions' queues."""
    if not lengths:
        return None
    return QueueLength(sum(each.waiting for each in lengths), sum(each.in_hand for each in lengths))


def _worker(presence: Presence, snapshot: Snapshot, rates: Rates) -> WorkerRow:
    load = presence.load or Load()
    counted = "prompt_tokens" if presence.role == PREFILL_ROLE else "output_tokens"
    return WorkerRow(
        watcher=presence.watcher,
        role=presence.role,
        revision=presence.revision,
        state=_state(presence, snapshot),
        detail=presence.detail,
        running=load.running,
        waiting=load.waiting,
        kv_usage=load.kv_usage,
        kv_pinned=load.kv_pinned,
        tokens_per_s=rates.rate((presence.lease, counted), snapshot.at),
        age_s=_age(presence, snapshot.at),
    )


def _process(presence: Presence, snapshot: Snapshot) -> ProcessRow:
    return ProcessRow(
        watcher=presence.watcher,
        role=presence.role,
        state=_state(presence, snapshot),
        detail=presence.url or presence.detail,
        age_s=_age(presence, snapshot.at),
    )


def _state(presence: Presence, snapshot: Snapshot) -> str:
    void = presence.state == "ready" and presence.lease not in snapshot.routable
    return REVOKED if void else presence.state


def _age(presence: Presence, now: float) -> float | None:
    return None if presence.started_at is None else max(0.0, now - presence.started_at)


class TopSession:
    """Follows one server from `start` to `close`."""

    def __init__(
        self,
        namespace: str,
        look: Callable[[], FleetLook],
        events: Callable[[], Iterable[Event]] = tuple,
        board: Callable[[], Board | None] = lambda: None,
    ) -> None:
        """`look` asks the server, `events` returns the events since its last call, `board` the board of endpoints. Each
        may block."""
        self._namespace = namespace
        self._look = look
        self._new_events = events
        self._board = board
        self._events: deque[Event] = deque(maxlen=_KEPT_EVENTS)
        self._seen = FleetLook(True, (), (), {}, None)
        self._rates = Rates()
        self._reader = FrontendReader()
        self._figures: ReadFigures | None = None
        self._tasks = TaskGuard()

    async def start(self) -> None:
        """Look for the first time, and go on in background tasks. Raises NotRunningError, SupervisorError."""
        await self._ask()
        self._tasks.spawn("server", self._follow())
        self._tasks.spawn("frontend", self._follow_frontend())

    async def wait(self, seconds: float, unless: asyncio.Event) -> None:
        """Wait for `seconds`, or until the event is set. Raises the error of a background task that has failed."""
        ends = {asyncio.create_task(self._tasks.failed()), asyncio.create_task(unless.wait())}
        done, pending = await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for end in pending:
            end.cancel()
        for end in done:
            end.result()

    async def close(self) -> None:
        """End the background tasks."""
        await self._tasks.close()

    def view(self) -> TopView:
        """Return the view of the present moment."""
        self._events.extend(self._new_events())
        seen = self._seen
        queues = dict(seen.queues)
        snapshot = Snapshot(
            time.monotonic(),
            seen.members,
            frozenset(seen.ready),
            queue=queues.pop(FIRST_OF_MAIN, None),
            planner=seen.planner,
        )
        return view_of(
            self._namespace,
            snapshot,
            self._rates,
            self._figures,
            recent(self._events),
            connected=seen.connected,
            board=self._board(),
            queues=queues,
        )

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            # A server that has ended is told by whoever shows this.
            with suppress(DynamoError):
                await self._ask()

    async def _ask(self) -> None:
        told, now = await asyncio.to_thread(self._look), time.monotonic()
        seen = replace(told, members=tuple(as_received(each, now) for each in told.members))
        for lease in {each.lease for each in self._seen.members} - {each.lease for each in seen.members}:
            self._rates.forget(lease)
        for each in seen.members:
            note_counts(self._rates, each, now)
        self._seen = seen

    async def _follow_frontend(self) -> None:
        while True:
            url = next((p.url for p in self._seen.members if p.role == FRONTEND_ROLE and p.url), None)
            began = time.monotonic()
            self._figures = None if url is None else await self._reader.read(url, began)
            # With many models the text is long, and takes the frontend's time from its requests.
            await asyncio.sleep(max(REFRESH_S / 2, _READ_SHARE * (time.monotonic() - began)))
