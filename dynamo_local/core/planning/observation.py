"""What one pull has found: who works, how loaded, what waits. What could not be read is None."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from dynamo_local.core.fleet.readings import Reading, reading_of
from dynamo_local.core.fleet.view import ENGINE_ROLES
from dynamo_local.core.messages.presence import MigrationCounts, Presence
from dynamo_local.core.migration.counts import migrations_of

Standing = Literal["starting", "routable", "retiring"]
"""starting: claimed, and not ready (yet, or again). retiring: drains, or its lease is revoked."""


@dataclass(frozen=True)
class Claim:
    """What the statefile says of a worker that runs, starts, restarts or ends (`retiring`)."""

    watcher: str
    role: str
    devices: int
    retiring: bool = False


@dataclass(frozen=True)
class WorkerSeen:
    """One worker. `reading` is None if there is none, or only a stale one. `devices` are those that it holds."""

    watcher: str
    role: str
    standing: Standing
    devices: int
    reading: Reading | None = None
    kv_tokens: int | None = None
    """Size of its KV cache, in tokens."""


@dataclass(frozen=True)
class QueueReading:
    """Prefill jobs that wait, and those that are with workers."""

    waiting: int
    in_hand: int


@dataclass(frozen=True)
class Observation:
    """One pull. `at` is CLOCK_MONOTONIC, in seconds.

    `workers` are ordered by watcher, and None if the statefile or the bus could not be read. `templates` names, for
    each role that the graph has, the service whose unsuffixed entry more workers are made from. `inventory` is how
    many devices there are.
    """

    at: float
    workers: tuple[WorkerSeen, ...] | None
    queue: QueueReading | None
    templates: Mapping[str, str]
    inventory: int | None = None
    moves: MigrationCounts | None = None
    """Of all frontends. Nothing is decided by them."""

    def of_role(self, role: str) -> tuple[WorkerSeen, ...]:
        """Workers of that role; none if nothing is known."""
        return tuple(worker for worker in self.workers or () if worker.role == role)

    @property
    def devices(self) -> int | None:
        """Devices that all workers hold together, those that start or leave included."""
        return None if self.workers is None else sum(worker.devices for worker in self.workers)


def observe(
    at: float,
    claims: Collection[Claim] | None,
    members: Iterable[Presence],
    routable: Iterable[Presence],
    queue: QueueReading | None,
    templates: Mapping[str, str],
    inventory: int | None = None,
) -> Observation:
    """Put together what statefile (`claims`), presences and queue say.

    `members` are all processes that are heard, `routable` those of them that may be given work. `claims` None: the
    statefile, or the bus, could not be read.
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
        moves=migrations_of(members),
    )


def _seen(claim: Claim, presence: Presence | None, routable: Collection[str], at: float) -> WorkerSeen:
    if presence is None:
        return WorkerSeen(claim.watcher, claim.role, "retiring" if claim.retiring else "starting", claim.devices)
    engine = presence.engine
    return WorkerSeen(
        watcher=claim.watcher,
        # The process itself is ahead of the statefile, if anything.
        role=presence.role if presence.role in ENGINE_ROLES else claim.role,
        standing="retiring" if claim.retiring else _standing(presence, routable),
        devices=claim.devices,
        reading=reading_of(presence.load, at, None if presence.counts is None else presence.counts.prefill_s),
        kv_tokens=None if engine is None else engine.kv_blocks * engine.block_size,
    )


def _standing(presence: Presence, routable: Collection[str]) -> Standing:
    if presence.lease in routable:
        return "routable"
    return "starting" if presence.state == "starting" else "retiring"
