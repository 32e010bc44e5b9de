"""What the planner sees: observations at a pull, and the windows of an adjustment interval. Pure.

What is unknown is None."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dynamo_local.core.fleet.rates import Reading, reading_of
from dynamo_local.core.fleet.view import ENGINE_ROLES, RoutingCounts, routing_of
from dynamo_local.core.messages.presence import MigrationCounts, Presence
from dynamo_local.core.migration.protocol import migrations_of
from dynamo_local.core.names import MAIN, parse_watcher
from dynamo_local.core.planning.options import PlannerOptions
from dynamo_local.core.shares import summed

# Observations: workers, their loads, and the prefill queue at a pull of the planner. What is unknown is None.

Standing = Literal["starting", "routable", "parked", "retiring"]
"""`starting`: the statefile has the worker, and it is not ready (yet, or again). `parked`: the worker takes no requests
until it is woken, and keeps its device. `retiring`: the worker drains, or its lease is revoked."""


@dataclass(frozen=True)
class Claim:
    """The statefile's entry of a worker that runs, starts, restarts or ends (`retiring`)."""

    watcher: str
    role: str
    devices: float
    retiring: bool = False
    endpoint: str = MAIN


@dataclass(frozen=True)
class WorkerSeen:
    """A worker at one pull. `devices`: number that it holds, or its share of one. `reading`: its load, None if missing
    or stale."""

    watcher: str
    role: str
    standing: Standing
    devices: float
    reading: Reading | None = None
    kv_tokens: int | None = None
    """Size of the KV cache, in tokens."""


@dataclass(frozen=True)
class QueueReading:
    """Numbers of prefill jobs: waiting in the queue, and in the hands of workers."""

    waiting: int
    in_hand: int


@dataclass(frozen=True)
class Observation:
    """The server at one pull. `at` is CLOCK_MONOTONIC, in seconds.

    `workers` are ordered by watcher, and None if the statefile or the bus could not be read. `templates` names, for
    each role of the graph, the service whose unsuffixed entry new workers copy. `inventory`: number of devices.
    """

    at: float
    workers: tuple[WorkerSeen, ...] | None
    queue: QueueReading | None
    templates: Mapping[str, str]
    inventory: int | None = None
    migrations: MigrationCounts | None = None
    """Migrations of all frontends, for recorders only: no policy reads them."""
    routing: RoutingCounts | None = None
    recomputed_tokens: int | None = None
    """What routers have counted, and what workers compute again after preemptions, for recorders only as well."""
    taken: float = 0
    """Devices that the workers of endpoints hold, or have been promised."""

    def of_role(self, role: str) -> tuple[WorkerSeen, ...]:
        """Return the workers of that role; none if the workers are unknown."""
        return tuple(worker for worker in self.workers or () if worker.role == role)

    @property
    def devices(self) -> float | None:
        """Devices that all workers hold together, shares of them added up, those of endpoints, starting and leaving
        ones included."""
        return None if self.workers is None else summed([self.taken, *(worker.devices for worker in self.workers)])


def observe(
    at: float,
    claims: Collection[Claim] | None,
    members: Iterable[Presence],
    routable: Iterable[Presence],
    queue: QueueReading | None,
    templates: Mapping[str, str],
    inventory: int | None = None,
    taken: float = 0,
) -> Observation:
    """Combine statefile (`claims`), presences and queue into an observation.

    `members`: all processes with a presence; `routable`: those of them that may be given work. `claims` is None if the
    statefile or the bus could not be read.
    """
    members = tuple(members)
    heard = {presence.watcher: presence for presence in members}
    good = {presence.lease for presence in routable}
    workers = None if claims is None else tuple(_seen(claim, heard.get(claim.watcher), good, at) for claim in claims)
    return Observation(
        at=at,
        workers=None if workers is None else tuple(sorted(workers, key=lambda worker: worker.watcher)),
        queue=queue,
        templates=dict(templates),
        inventory=inventory,
        migrations=migrations_of(members),
        routing=routing_of(members),
        recomputed_tokens=_recomputed(members),
        taken=taken,
    )


def _recomputed(members: Iterable[Presence]) -> int | None:
    loads = [member.load for member in members if member.load is not None]
    known = [load.recomputed_tokens for load in loads if load.recomputed_tokens is not None]
    return sum(known) if known else None


def _seen(claim: Claim, presence: Presence | None, routable: Collection[str], at: float) -> WorkerSeen:
    if presence is None:
        return WorkerSeen(claim.watcher, claim.role, "retiring" if claim.retiring else "starting", claim.devices)
    engine = presence.engine
    return WorkerSeen(
        watcher=claim.watcher,
        # After a switch of roles the presence has the new role before the statefile has.
        role=presence.role if presence.role in ENGINE_ROLES else claim.role,
        standing="retiring" if claim.retiring else _standing(presence, routable),
        devices=claim.devices,
        reading=reading_of(presence.load, at, None if presence.counts is None else presence.counts.prefill_s),
        kv_tokens=None if engine is None else engine.kv_blocks * engine.block_size,
    )


def _standing(presence: Presence, routable: Collection[str]) -> Standing:
    if presence.lease in routable:
        return "routable"
    return presence.state if presence.state in ("starting", "parked") else "retiring"


# Aggregates the pulls of one adjustment interval into a window, and keeps a history of windows. Pure.


@dataclass(frozen=True)
class WorkerWindow:
    """A worker at the end of the interval, with means over its readings.

    The means are None if the last pull has no reading of the worker: earlier ones may no longer hold.
    """

    watcher: str
    role: str
    standing: Standing
    devices: float
    kv_tokens: int | None = None
    last: Reading | None = None
    kv_usage: float | None = None
    pressure: float | None = None
    """Mean KV usage, 0 to 1, where each moment with waiting requests counts as 1: such a worker has no room for more
    whatever its KV usage, for example because its batch is full."""
    running: float | None = None
    waiting: float | None = None
    busy: float | None = None
    """Share of the time for which the worker had requests without a first token, 0 to 1."""
    head_tokens: float | None = None
    """Mean size of the first waiting request, in tokens; moments without one count as 0."""
    urgent: float | None = None
    """Mean number of running requests of the priority class high."""

    @property
    def rank(self) -> tuple[int, str]:
        """Sort key: by suffix, then by name."""
        return parse_watcher(self.watcher).index, self.watcher

    @property
    def in_flight(self) -> float | None:
        return None if self.running is None or self.waiting is None else self.running + self.waiting


@dataclass(frozen=True)
class RoleWindow:
    """The workers of one role, ordered by watcher. `template`: the service that new workers of the role copy.
    `began_with`: number of routable workers at the first pull; None if the workers were unknown then."""

    role: str
    template: str
    workers: tuple[WorkerWindow, ...] = ()
    began_with: int | None = None

    def _standing(self, standing: Standing) -> tuple[WorkerWindow, ...]:
        return tuple(worker for worker in self.workers if worker.standing == standing)

    @property
    def routable(self) -> tuple[WorkerWindow, ...]:
        return self._standing("routable")

    @property
    def starting(self) -> tuple[WorkerWindow, ...]:
        return self._standing("starting")

    @property
    def staying(self) -> tuple[WorkerWindow, ...]:
        """Workers that are not retiring."""
        return tuple(worker for worker in self.workers if worker.standing != "retiring")

    @property
    def known(self) -> tuple[WorkerWindow, ...]:
        """Routable workers whose load is known."""
        return tuple(worker for worker in self.routable if worker.last is not None)

    @property
    def unread(self) -> tuple[WorkerWindow, ...]:
        """Routable workers whose load is not known."""
        return tuple(worker for worker in self.routable if worker.last is None)

    @property
    def pressure(self) -> float | None:
        return mean(worker.pressure for worker in self.known)

    @property
    def kv_usage(self) -> float | None:
        return mean(worker.kv_usage for worker in self.known)

    @property
    def waiting(self) -> float | None:
        """Mean number of waiting requests, all workers of the role together."""
        return total(worker.waiting for worker in self.known)

    @property
    def in_flight(self) -> float | None:
        """Mean number of running and waiting requests, all workers of the role together."""
        return total(worker.in_flight for worker in self.known)

    @property
    def busy(self) -> float | None:
        """Mean number of workers of the role that were busy."""
        return total(worker.busy for worker in self.known)


@dataclass(frozen=True)
class QueueWindow:
    """Waiting prefill jobs at the first and the last pull, and on average. `in_flight`: mean number of waiting jobs and
    of those in the hands of workers."""

    first: int
    last: int
    mean: float
    in_flight: float


@dataclass(frozen=True)
class Window:
    """An adjustment interval, from `started` to `ended` (CLOCK_MONOTONIC, s).

    `roles`: the roles of the graph; None if statefile or bus could not be read at the last pull. `queue`: None if the
    queue could not be read then, or the graph has none. `inventory`: number of devices. `failed`: roles whose action at
    the end of the interval failed. `added`: roles to which a worker was added then. `taken`: devices that endpoints
    have.
    """

    started: float
    ended: float
    pulls: int
    roles: Mapping[str, RoleWindow] | None
    queue: QueueWindow | None = None
    inventory: int | None = None
    failed: frozenset[str] = frozenset()
    added: frozenset[str] = frozenset()
    taken: float = 0

    def role(self, name: str) -> RoleWindow | None:
        return None if self.roles is None else self.roles.get(name)


History = tuple[Window, ...]
"""Earlier windows, newest last."""

KEPT_WINDOWS = 8
"""Minimum number of windows in a history; options of some policies ask for more."""


def remember(history: History, window: Window, options: PlannerOptions) -> History:
    """Append a window to the history, and drop windows that no policy looks at any more."""
    since = window.ended - options.concurrency_window
    longer = (*history, window)
    kept = max(KEPT_WINDOWS, options.freeness_hold_intervals)
    return tuple(old for number, old in enumerate(reversed(longer)) if number < kept or old.ended >= since)[::-1]


def aggregate(pulls: Sequence[Observation]) -> Window:
    """Return the window of at least one pull, oldest first."""
    last = pulls[-1]
    return Window(
        started=pulls[0].at,
        ended=last.at,
        pulls=len(pulls),
        roles=_roles(pulls) if last.workers is not None else None,
        queue=_queue([pull.queue for pull in pulls]),
        inventory=last.inventory,
        taken=last.taken,
    )


def _roles(pulls: Sequence[Observation]) -> dict[str, RoleWindow]:
    first, last = pulls[0], pulls[-1]
    return {
        role: RoleWindow(
            role,
            template,
            tuple(sorted((_worker(seen, pulls) for seen in last.of_role(role)), key=lambda worker: worker.watcher)),
            None if first.workers is None else sum(seen.standing == "routable" for seen in first.of_role(role)),
        )
        for role, template in sorted(last.templates.items())
    }


def _worker(seen: WorkerSeen, pulls: Sequence[Observation]) -> WorkerWindow:
    window = WorkerWindow(seen.watcher, seen.role, seen.standing, seen.devices, seen.kv_tokens)
    if seen.reading is None:
        return window
    read = [
        (pull.at - worker.reading.age_s, worker.reading)
        for pull in pulls
        for worker in pull.of_role(seen.role)
        if worker.watcher == seen.watcher and worker.reading is not None
    ]
    readings = [reading for _, reading in read]
    return WorkerWindow(
        seen.watcher,
        seen.role,
        seen.standing,
        seen.devices,
        seen.kv_tokens,
        last=seen.reading,
        kv_usage=mean(reading.kv_usage for reading in readings),
        pressure=mean(1.0 if reading.waiting > 0 else reading.kv_usage for reading in readings),
        running=mean(reading.running for reading in readings),
        waiting=mean(reading.waiting for reading in readings),
        busy=_busy(read),
        head_tokens=mean(reading.head_tokens for reading in readings),
        urgent=mean(reading.urgent for reading in readings),
    )


def _busy(read: Sequence[tuple[float, Reading]]) -> float | None:
    """Return the share of the time with unfinished prefills, 0 to 1, from the growth of `prefill_s` between the first
    and the last reading. Sampling would be wrong: loads are reported at the end of a step, when most prefills end."""
    (begin, first), (end, last) = read[0], read[-1]
    if first.prefill_s is None or last.prefill_s is None or end <= begin or last.prefill_s < first.prefill_s:
        # The engine does not report prefill time, sent no new load, or restarted and counts from 0 again.
        return mean(float(reading.running + reading.waiting > 0) for _, reading in read)
    return min((last.prefill_s - first.prefill_s) / (end - begin), 1.0)


def _queue(readings: Sequence[QueueReading | None]) -> QueueWindow | None:
    known = [reading for reading in readings if reading is not None]
    if readings[-1] is None or not known:
        return None
    waiting = mean(reading.waiting for reading in known)
    in_flight = mean(reading.waiting + reading.in_hand for reading in known)
    assert waiting is not None, "there is a reading"
    assert in_flight is not None, "there is a reading"
    return QueueWindow(known[0].waiting, known[-1].waiting, waiting, in_flight)


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the known values, or None if none is known. Does not depend on their order."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def total(values: Iterable[float | None]) -> float | None:
    """Return the sum of the known values, or None if none is known. Does not depend on their order."""
    known = [value for value in values if value is not None]
    return math.fsum(known) if known else None
