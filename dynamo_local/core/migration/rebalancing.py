"""Decides which requests migrate so that no worker runs full while others are free. Pure.

As in Llumnix (OSDI'24, section 4.4), by freeness (freeness.py), in steps:

    relieve    the least free worker below `below` gives requests to the freest worker above `above`, until either has
               left its range
    make room  a worker whose first waiting request does not fit gives away others, until that request fits, to workers
               that have room without being so free; only if it does fit in the end
    thrash     a worker that preempts its requests again and again (`ThrashWatch`) gives others away, as few as it takes
               that all of them fit and can grow, to workers where what comes can grow as well

Of a worker's requests the least urgent go first, then the shortest: they migrate fastest, and disturb others least.
None makes way for a request of a lower class: one of the class high leaves a full worker only if that runs no others.

No migration makes its destination less free than `below`, nor than its source was. So under a constant load requests do
not migrate for ever: each migration takes a request off a worker below `below` and never makes another such worker, or
lets a request in that has waited. Workers whose load is unknown take no part.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from dynamo_local.core.fleet.freeness import Instance, Usage, freeness, instance_of, with_more
from dynamo_local.core.fleet.rates import reading_of
from dynamo_local.core.messages.presence import Load, Presence
from dynamo_local.core.priority.classes import PriorityClass, class_of

Reason = Literal["rebalance", "room", "thrash"]

GROWTH_STEPS = 100.0
"""Steps for which the requests of a worker that thrashed can grow until its KV cache is full again."""


@dataclass(frozen=True)
class RebalancingLimits:
    """When requests migrate. `below` and `above` are freeness, in steps until a KV cache is full; `above` counts as no
    less than `below`."""

    below: float = 100.0
    above: float = 400.0
    period_s: float = 30.0
    """Seconds for which a request that has migrated stays where it is."""
    at_once: int = 8
    """Migrations decided at once: the loads that they go by soon change."""

    @property
    def takes_from(self) -> float:
        """Freeness above which a worker takes requests."""
        return max(self.above, self.below)


@dataclass(frozen=True)
class WorkerRoom:
    """A worker, with the effect of migrations in progress. `slots`: number of requests that it could run besides.
    `head`: class of the first waiting request, if one waits. `preempted_tokens`: contexts of those that wait although
    they have run. `thrashing`: see `ThrashWatch`."""

    lease: str
    instance: Instance
    slots: int
    head: PriorityClass = PriorityClass.NORMAL
    preempted_tokens: int = 0
    thrashing: bool = False

    @property
    def freeness(self) -> float:
        return freeness(self.instance)

    @property
    def free_tokens(self) -> float:
        return self.instance.kv_tokens - self.instance.used

    @property
    def is_blocked(self) -> bool:
        """Whether a request waits there that does not fit. One that has run waits for a slot alone, which it lost to a
        more urgent one: in too little KV cache it would be preempted again."""
        head, fits = self.instance.head_tokens, self.free_tokens >= self.instance.head_tokens
        return head > 0 and (self.slots < 1 if fits else self.preempted_tokens == 0)

    @property
    def lacking_tokens(self) -> float:
        """Room that a worker lacks for the requests that wait although they have run, and for all to grow."""
        growth = GROWTH_STEPS * max(self.instance.batch, 1.0)
        return max(self.preempted_tokens, self.instance.head_tokens) + growth - self.free_tokens

    @property
    def has_no_queue(self) -> bool:
        """Whether nobody waits there, and nobody has been preempted lately."""
        return self.instance.head_tokens == 0 and self.preempted_tokens == 0 and not self.thrashing

    @property
    def runs_only_urgent(self) -> bool:
        """Whether all requests that run there are of the class high."""
        return self.instance.runs(PriorityClass.HIGH) >= self.instance.batch

    def with_request(self, candidate: Candidate) -> WorkerRoom:
        """Return the worker with one request more."""
        more = Usage(candidate.tokens, candidate.priority_class)
        return replace(self, instance=with_more(self.instance, more), slots=self.slots - 1)

    def without_request(self, candidate: Candidate) -> WorkerRoom:
        """Return the worker with one request less."""
        less = Usage(-candidate.tokens, candidate.priority_class, -1)
        return replace(self, instance=with_more(self.instance, less), slots=self.slots + 1)


@dataclass(frozen=True)
class Candidate:
    """A request that may migrate. `tokens`: length of its context, `generated`: those of them that are output;
    `priority`: lower is more urgent."""

    request_id: str
    worker: str
    tokens: int
    priority: int = 0
    generated: int = 0

    @property
    def priority_class(self) -> PriorityClass:
        return class_of(self.priority)


@dataclass(frozen=True)
class PlannedMigration:
    """A migration to be made, if it leaves the destination no less free than `floor`."""

    request_id: str
    source: str
    destination: str
    reason: Reason
    floor: float


def room_of(worker: Presence, now: float, change: Usage) -> WorkerRoom | None:
    """Return a worker's room by its presence; None if that is unknown, or if KV cannot be pulled from or to the worker.
    `change`: see `instance_of`."""
    instance = instance_of(worker, now, change)
    if instance is None or worker.engine is None or worker.engine.no_transfer is not None:
        return None
    load = worker.load or Load()
    head, slots = class_of(load.head_priority or 0), int(worker.engine.max_num_seqs - instance.batch)
    return WorkerRoom(worker.lease, instance, slots, head, load.preempted_tokens or 0)


def plan(
    rooms: Collection[WorkerRoom], candidates: Iterable[Candidate], limits: RebalancingLimits
) -> tuple[PlannedMigration, ...]:
    """Return the migrations to be made now, in order; none if no worker runs full, or nothing helps."""
    draft = _Plan(rooms, candidates, limits)
    while len(draft.migrations) < limits.at_once and (draft.end_thrashing() or draft.relieve() or draft.make_room()):
        pass
    return tuple(draft.migrations[: limits.at_once])


class _Plan:
    """The workers as they would be after the migrations decided so far."""

    def __init__(self, rooms: Iterable[WorkerRoom], candidates: Iterable[Candidate], limits: RebalancingLimits) -> None:
        self._limits = limits
        self._rooms = {room.lease: room for room in rooms}
        self._candidates: defaultdict[str, list[Candidate]] = defaultdict(list)
        for candidate in sorted(candidates, key=lambda one: (-one.priority, one.tokens, one.request_id)):
            self._candidates[candidate.worker].append(candidate)
        self.migrations: list[PlannedMigration] = []

    def end_thrashing(self) -> bool:
        """Decide one migration off a worker that thrashes and has not room enough yet. Return whether there is one."""
        givers = [room for room in self._rooms.values() if room.thrashing and room.lacking_tokens > 0]
        takers = [room for room in self._rooms.values() if room.has_no_queue]
        return any(
            self._migrate(giver, candidate, takers, "thrash")
            for giver in sorted(givers, key=lambda room: (room.freeness, room.lease))
            for candidate in _fewest_first(self._candidates[giver.lease], giver.lacking_tokens)
            if candidate.priority_class is not PriorityClass.HIGH or giver.runs_only_urgent
        )

    def relieve(self) -> bool:
        """Decide one migration from the least free worker that has a request to give. Return whether there is one."""
        takers = [room for room in self._rooms.values() if room.freeness > self._limits.takes_from]
        givers = [room for room in self._rooms.values() if room.freeness < self._limits.below]
        return any(
            self._migrate(giver, candidate, takers, "rebalance")
            for giver in sorted(givers, key=lambda room: (room.freeness, room.lease))
            for candidate in self._candidates[giver.lease]
            if candidate.priority_class is not PriorityClass.HIGH or giver.runs_only_urgent
        )

    def make_room(self) -> bool:
        """Decide migrations that let in the first request of a queue. Return whether there is one that can be let
        in."""
        blocked = [room for room in self._rooms.values() if room.is_blocked]
        return any(self._let_in(room) for room in sorted(blocked, key=lambda room: (room.freeness, room.lease)))

    def _let_in(self, blocked: WorkerRoom) -> bool:
        rooms, candidates, migrations = dict(self._rooms), self._candidates[blocked.lease], self.migrations
        self._candidates[blocked.lease], self.migrations = list(candidates), list(migrations)
        for candidate in candidates:
            if candidate.priority_class.rank < blocked.head.rank:
                continue
            takers = [room for room in self._rooms.values() if room.instance.head_tokens == 0]
            self._migrate(self._rooms[blocked.lease], candidate, takers, "room")
            if not self._rooms[blocked.lease].is_blocked:
                return True
        # Migrations that do not let the waiting request in gain nothing.
        self._rooms, self._candidates[blocked.lease], self.migrations = rooms, candidates, migrations
        return False

    def _migrate(self, giver: WorkerRoom, candidate: Candidate, takers: Iterable[WorkerRoom], reason: Reason) -> bool:
        ends_thrashing = reason == "thrash"
        floor = max(self._limits.below, giver.freeness, GROWTH_STEPS if ends_thrashing else -math.inf)
        # Nothing else is known of how long an answer will be than that it has come so far.
        growth = candidate.generated if ends_thrashing else 0
        able = [taker for taker in takers if taker.lease != giver.lease and _takes(taker, candidate, floor, growth)]
        if not able:
            return False
        taker = max(able, key=lambda room: (room.freeness, room.lease))
        self._rooms[giver.lease] = giver.without_request(candidate)
        self._rooms[taker.lease] = taker.with_request(candidate)
        self._candidates[giver.lease].remove(candidate)
        self.migrations.append(PlannedMigration(candidate.request_id, giver.lease, taker.lease, reason, floor))
        return True


def _takes(taker: WorkerRoom, candidate: Candidate, floor: float, growth: int) -> bool:
    after = taker.with_request(candidate)
    return taker.slots >= 1 and after.free_tokens >= growth and after.freeness >= floor


def _fewest_first(candidates: Iterable[Candidate], lacking: float) -> list[Candidate]:
    """Of the least urgent ones, the shortest whose leaving is enough; if none is, the longest."""

    def rank(candidate: Candidate) -> tuple[int, bool, int, str]:
        enough = candidate.tokens >= lacking
        return -candidate.priority, not enough, candidate.tokens if enough else -candidate.tokens, candidate.request_id

    return sorted(candidates, key=rank)


# Tells which workers thrash: take KV from running requests again and again, and compute it anew. Pure.
#
# One preemption is no spiral: a request that was preempted once may find room when the next one ends. So a worker
# begins to thrash with the second sign within `CALM_S`, and does until it has shown none for as long. Signs are
# requests that wait although they have run, and contexts given up since the last look.

CALM_S = 5.0
"""Some hundred decode steps: what a worker without room for the growth of its requests does not pass quietly."""

_ONE_MEASUREMENT_S = 0.1
"""Moments of one measurement that is told twice differ by less: a load has an age, and messages travel for more or less
time (core/messages/presence.py)."""


@dataclass(frozen=True)
class PreemptionSigns:
    """What was last seen of a worker. `measured_at`: when its load was measured; `seen_at`: time of the last sign, None
    before the first. Times are CLOCK_MONOTONIC, in seconds."""

    measured_at: float
    recomputed_tokens: int | None
    seen_at: float | None = None
    thrashing: bool = False


class ThrashWatch:
    """Follows the loads that workers report."""

    def __init__(self) -> None:
        self._signs: dict[str, PreemptionSigns] = {}

    def look(self, workers: Iterable[Presence], now: float) -> Collection[str]:
        """Return the leases of workers that thrash. What is known of a worker is forgotten with its load."""
        loads = {worker.lease: worker.load for worker in workers if reading_of(worker.load, now) is not None}
        self._signs = {
            lease: signs_after(self._signs.get(lease), load, now) for lease, load in loads.items() if load is not None
        }
        return {lease for lease, signs in self._signs.items() if signs.thrashing}


def signs_after(known: PreemptionSigns | None, load: Load, now: float) -> PreemptionSigns:
    """Return what is known of a worker after this load, which must have been measured."""
    assert load.at is not None
    if known is None:
        known = PreemptionSigns(load.at - 1.0, load.recomputed_tokens)
    recent = known.seen_at is not None and now - known.seen_at <= CALM_S
    if load.at <= known.measured_at + _ONE_MEASUREMENT_S:
        return replace(known, thrashing=known.thrashing and recent)
    if _is_sign(known, load):
        return PreemptionSigns(load.at, load.recomputed_tokens, now, known.thrashing or recent)
    return PreemptionSigns(load.at, load.recomputed_tokens, known.seen_at, known.thrashing and recent)


def _is_sign(known: PreemptionSigns, load: Load) -> bool:
    before, after = known.recomputed_tokens, load.recomputed_tokens
    return bool(load.preempted_tokens) or (before is not None and after is not None and after > before)
