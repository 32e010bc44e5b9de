"""The contents of `dynamo top`, as data. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from dynamo_local.bus.prefill_queue import QueueLength
from dynamo_local.core.fleet.view import ENGINE_ROLES, PREFILL_ROLE
from dynamo_local.core.messages.events import Event
from dynamo_local.core.messages.planner import PlannerReport
from dynamo_local.core.messages.presence import Counts, Load, MigrationCounts, Presence
from dynamo_local.core.migration.counts import migrations_of
from dynamo_local.monitor.graph_watch import Snapshot
from dynamo_local.monitor.rates import Rates
from dynamo_local.monitor.scraping import FrontendFigures

SHOWN_EVENTS = 6

_NOT_SHOWN = frozenset({"device", "planner"})
"""Kinds of events that are seen elsewhere on the screen."""

_NUMBER = re.compile(r"\d+(?:\.\d+)?")

REVOKED = "revoked"
"""State that is shown for a process whose lease is revoked: it gets no more work."""


class WorkerRow(msgspec.Struct, frozen=True, kw_only=True):
    """A worker. `tokens_per_s`: rate of generated tokens, in the prefill role of computed prompt tokens."""

    watcher: str
    role: str
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


class EventRow(msgspec.Struct, frozen=True, kw_only=True):
    """An event, or several of one kind and watcher in a row: the last of them, at `time` (Unix time, s)."""

    time: float
    watcher: str
    what: str
    times: int = 1


class TopView(msgspec.Struct, frozen=True, kw_only=True):
    """The whole contents. None: unknown, or the graph has no such part. `connected`: whether NATS can be reached."""

    namespace: str
    workers: tuple[WorkerRow, ...]
    processes: tuple[ProcessRow, ...]
    queue: QueueLength | None
    frontend: FrontendFigures | None
    planner: PlannerReport | None
    migrations: MigrationCounts | None
    events: tuple[EventRow, ...] = ()
    """The last events, the newest last."""
    connected: bool = True


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
        gist = event.kind, event.watcher, _NUMBER.sub("#", event.what)
        times = rows.pop().times + 1 if gist == previous else 1
        what = event.what if event.request is None or times > 1 else f"{event.request} {event.what}"
        rows.append(EventRow(time=event.time, watcher=event.watcher, what=what, times=times))
        previous = gist
    return tuple(rows[-number:])


def view_of(
    namespace: str,
    snapshot: Snapshot,
    rates: Rates,
    figures: FrontendFigures | None,
    events: tuple[EventRow, ...] = (),
    *,
    connected: bool = True,
) -> TopView:
    """Return the view at the snapshot's moment."""
    workers = [member for member in snapshot.members if member.role in ENGINE_ROLES]
    others = [member for member in snapshot.members if member.role not in ENGINE_ROLES]
    return TopView(
        namespace=namespace,
        workers=tuple(_worker(presence, snapshot, rates) for presence in workers),
        processes=tuple(_process(presence, snapshot) for presence in others),
        queue=snapshot.queue,
        frontend=figures,
        planner=snapshot.planner,
        migrations=migrations_of(snapshot.members),
        events=events,
        connected=connected,
    )


def _worker(presence: Presence, snapshot: Snapshot, rates: Rates) -> WorkerRow:
    load = presence.load or Load()
    counted = "prompt_tokens" if presence.role == PREFILL_ROLE else "output_tokens"
    return WorkerRow(
        watcher=presence.watcher,
        role=presence.role,
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
