"""What the planner sees: the endpoints at a pull, and the windows of an endpoint's adjustment intervals. Pure.

What is unknown is None."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.fleet.rates import Reading, reading_of
from dynamo_local.core.fleet.view import AGGREGATED_ROLE, DECODE_ROLE, ENGINE_ROLES, PREFILL_ROLE, RoutingCounts
from dynamo_local.core.messages.endpoints import EndpointStatus, EndpointView
from dynamo_local.core.messages.presence import MigrationCounts, Presence
from dynamo_local.core.messages.work import QueueLength
from dynamo_local.core.names import MAIN, parse_watcher
from dynamo_local.core.planning.options import PlannerOptions
from dynamo_local.core.shares import summed

# Observations: endpoints, their workers with their loads, and their prefill queues at a pull of the planner.

Standing = Literal["starting", "routable", "parked", "retiring"]
"""`starting`: the statefile has the worker, and it is not ready (yet, or again). `parked`: the worker takes no requests
until it is woken, and keeps its device. `retiring`: the worker drains, or its lease is revoked."""


@dataclass(frozen=True)
class Claim:
    """The statefile's entry of a worker of an endpoint that runs, starts, restarts or ends (`retiring`)."""

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
class Fleet:
    """The workers of an endpoint's revisions and its prefill queue at one pull. `at` is CLOCK_MONOTONIC, in seconds.

    `workers` are ordered by watcher, and None if the statefile or the bus could not be read. `templates` names, for
    each role of the endpoint, the service whose unsuffixed entry new workers copy.
    """

    at: float
    workers: tuple[WorkerSeen, ...] | None
    queue: QueueLength | None
    templates: Mapping[str, str]

    def of_role(self, role: str) -> tuple[WorkerSeen, ...]:
        """Return the workers of that role; none if the workers are unknown."""
        return tuple(worker for worker in self.workers or () if worker.role == role)

    @property
    def devices(self) -> float | None:
        """Devices that the workers hold together, shares of them added up, starting and leaving ones included."""
        return None if self.workers is None else summed(worker.devices for worker in self.workers)


def observe(
    at: float,
    claims: Collection[Claim] | None,
    members: Iterable[Presence],
    routable: Iterable[Presence],
    queue: QueueLength | None,
    templates: Mapping[str, str],
) -> Fleet:
    """Combine statefile (`claims`), presences and queue of an endpoint.

    `members`: all processes with a presence; `routable`: those of them that may be given work. `claims` is None if the
    statefile or the bus could not be read.
    """
    heard = {presence.watcher: presence for presence in members}
    good = {presence.lease for presence in routable}
    workers = None if claims is None else tuple(_seen(claim, heard.get(claim.watcher), good, at) for claim in claims)
    ordered = None if workers is None else tuple(sorted(workers, key=lambda worker: worker.watcher))
    return Fleet(at, ordered, queue, dict(templates))


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


@dataclass(frozen=True)
class EndpointSeen:
    """An endpoint at one pull.

    `in_flight`: requests that frontends have admitted and not finished, waiting ones included. `held`: those of
    them that wait for a worker. `queued`: asynchronous tasks beside them.

    `by_actions`: its changes are actions, ordered one at a time at the end of an adjustment interval, within the
    budgets of the planner's options. Otherwise numbers of workers are ordered at every pull, within the bounds of its
    spec.
    """

    view: EndpointView
    fleet: Fleet
    in_flight: int | None = None
    held: int | None = None
    queued: int = 0
    by_actions: bool = False

    @property
    def spec(self) -> EndpointSpec:
        return self.view.spec

    @property
    def status(self) -> EndpointStatus:
        return self.view.status

    @property
    def name(self) -> str:
        return self.view.spec.name

    @property
    def age(self) -> tuple[float, str]:
        """Sort key: the oldest endpoint first."""
        return self.view.created_at, self.name

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(self.fleet.templates)

    def ready(self, role: str) -> int | None:
        """Number of workers of a role that take requests; None if the workers are unknown."""
        if self.fleet.workers is None:
            return None
        return sum(worker.standing == "routable" for worker in self.fleet.of_role(role))

    def ordered(self, role: str) -> int:
        """Number of workers of a role that the server has been told to run."""
        return self.status.wanted_prefill if role == PREFILL_ROLE else self.status.wanted

    def demand(self, role: str) -> int | None:
        """What the workers of a role have to do now: requests in flight, and queued tasks; for prefill workers the jobs
        in their queue and in their hands. None if that cannot be read."""
        if role != PREFILL_ROLE:
            return None if self.in_flight is None else self.in_flight + self.queued
        queue = self.fleet.queue
        return None if queue is None else queue.waiting + queue.in_hand


def worker_roles(spec: EndpointSpec) -> tuple[str, ...]:
    """The roles of an endpoint's workers. An adapter of another endpoint has none."""
    if spec.adapter_of is not None:
        return ()
    return (DECODE_ROLE, PREFILL_ROLE) if spec.disaggregated else (AGGREGATED_ROLE,)


def main_of(fleet: Fleet) -> EndpointSeen:
    """Return the endpoint of the graph's own model, of which the board has no view."""
    view = EndpointView(EndpointSpec(name=MAIN, model=""), EndpointStatus("ready"), 0.0, 0.0)
    return EndpointSeen(view, fleet, by_actions=True)


@dataclass(frozen=True)
class Observation:
    """The server at one pull. `at` is CLOCK_MONOTONIC, in seconds.

    `endpoints`: those of the board, and that of the graph's own model if it has one. `held`: devices that all workers
    hold together, shares of them added up, starting and leaving ones included. `inventory`: number of devices. `board`:
    number of the board. The rest is counted by all processes together, for recorders only: no policy reads it.
    """

    at: float
    endpoints: tuple[EndpointSeen, ...]
    held: float | None
    inventory: int | None = None
    board: int = 0
    migrations: MigrationCounts | None = None
    routing: RoutingCounts | None = None
    recomputed_tokens: int | None = None

    @property
    def main(self) -> EndpointSeen | None:
        """The endpoint that is changed by actions; None if the graph has no workers of its own."""
        return next((seen for seen in self.endpoints if seen.by_actions), None)

    @property
    def others(self) -> tuple[EndpointSeen, ...]:
        """The endpoints that are ordered by numbers, the oldest first."""
        return tuple(sorted((seen for seen in self.endpoints if not seen.by_actions), key=lambda seen: seen.age))


def recomputed_of(members: Iterable[Presence]) -> int | None:
    """Return the tokens that workers have computed again after preemptions, all together. None if none tells."""
    loads = [member.load for member in members if member.load is not None]
    known = [load.recomputed_tokens for load in loads if load.recomputed_tokens is not None]
    return sum(known) if known else None


# Aggregates the pulls of one adjustment interval into a window, and keeps a history of windows. Pure.


@dataclass(frozen=True)
class WorkerWindow(WorkerSeen):
    """A worker at the end of the interval, with means over its readings.

    The means are None if the last pull has no reading of the worker: earlier ones may no longer hold.
    """

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
        return tuple(worker for worker in self.routable if worker.reading is not None)

    @property
    def unread(self) -> tuple[WorkerWindow, ...]:
        """Routable workers whose load is not known."""
        return tuple(worker for worker in self.routable if worker.reading is None)

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

    `roles`: the roles of the endpoint; None if statefile or bus could not be read at the last pull. `queue`: None if
    the queue could not be read then, or there is none. `failed`: roles whose action at the end of the interval failed.
    `added`: roles to which a worker was added then.
    """

    started: float
    ended: float
    pulls: int
    roles: Mapping[str, RoleWindow] | None
    queue: QueueWindow | None = None
    failed: frozenset[str] = frozenset()
    added: frozenset[str] = frozenset()

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


def aggregate(pulls: Sequence[Fleet]) -> Window:
    """Return the window of at least one pull, oldest first."""
    last = pulls[-1]
    return Window(
        started=pulls[0].at,
        ended=last.at,
        pulls=len(pulls),
        roles=_roles(pulls) if last.workers is not None else None,
        queue=_queue([pull.queue for pull in pulls]),
    )


def _roles(pulls: Sequence[Fleet]) -> dict[str, RoleWindow]:
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


def _worker(seen: WorkerSeen, pulls: Sequence[Fleet]) -> WorkerWindow:
    if seen.reading is None:
        return WorkerWindow(**vars(seen))
    read = [
        (pull.at - worker.reading.age_s, worker.reading)
        for pull in pulls
        for worker in pull.of_role(seen.role)
        if worker.watcher == seen.watcher and worker.reading is not None
    ]
    readings = [reading for _, reading in read]
    return WorkerWindow(
        **vars(seen),
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


def _queue(readings: Sequence[QueueLength | None]) -> QueueWindow | None:
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
