"""Observations: workers, their loads, and the prefill queue at a pull of the planner. What is unknown is None."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from dynamo_local.core.fleet.rates import Reading, reading_of
from dynamo_local.core.fleet.view import ENGINE_ROLES
from dynamo_local.core.messages.presence import MigrationCounts, Presence
from dynamo_local.core.migration.protocol import migrations_of
from dynamo_local.core.routing.counts import RoutingCounts, routing_of
from dynamo_local.core.shares import summed

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
