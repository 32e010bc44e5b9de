"""Which requests move so that no worker runs full while others are free. Pure.

As in Llumnix (OSDI'24, section 4.4), by freeness (freeness.py), in steps:

    relieve    the least free worker below `below` gives requests to the freest one above `above`, until either has
               left its range
    make room  a worker whose first waiting request does not fit gives away others, until it does, to workers that have
               room without being so free; only if it does fit in the end

Of a worker's requests the least urgent go first, then the shortest: they are moved fastest, and do least harm.

No move makes its destination less free than `below`, nor than its source was. So under a load that stays as it is
nothing moves for ever: a move takes a request off a worker below `below` and never makes another such, or lets a
request in that has waited. What is not known takes no part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from dynamo_local.core.fleet.freeness import Instance, Usage, freeness, instance_of, with_more
from dynamo_local.core.messages.presence import Presence

Reason = Literal["rebalance", "room"]


@dataclass(frozen=True)
class RebalancingLimits:
    """`below`, `above`: freeness, in steps until a KV cache is full; `above` counts as no less than `below`."""

    below: float = 100.0
    above: float = 400.0
    period_s: float = 30.0
    """A request that has moved is left where it is for so long."""
    at_once: int = 8
    """Moves decided together: the loads that they go by are soon others."""

    @property
    def takes_from(self) -> float:
        """A worker must be freer than this to take."""
        return max(self.above, self.below)


@dataclass(frozen=True)
class WorkerRoom:
    """A worker, with what moves under way will change. `slots`: requests that it could run besides."""

    lease: str
    instance: Instance
    slots: int

    @property
    def freeness(self) -> float:
        return freeness(self.instance)

    @property
    def free_tokens(self) -> float:
        return self.instance.kv_tokens - self.instance.used

    @property
    def is_blocked(self) -> bool:
        """Whether a request waits there that does not fit."""
        head = self.instance.head_tokens
        return head > 0 and (self.slots < 1 or self.free_tokens < head)

    def changed(self, tokens: int, requests: int) -> WorkerRoom:
        """With so many tokens and requests more."""
        return replace(
            self, instance=with_more(self.instance, Usage(tokens, requests=requests)), slots=self.slots - requests
        )


@dataclass(frozen=True)
class Candidate:
    """A request that may be moved. `tokens`: its context; `priority`: lower is more urgent."""

    request_id: str
    worker: str
    tokens: int
    priority: int = 0


@dataclass(frozen=True)
class PlannedMigration:
    """A move to be made, if it leaves the destination no less free than `floor`."""

    request_id: str
    source: str
    destination: str
    reason: Reason
    floor: float


def room_of(worker: Presence, now: float, change: Usage) -> WorkerRoom | None:
    """A worker as it tells of itself; None if that is not known, or it lends no KV. `change`: see `instance_of`."""
    instance = instance_of(worker, now, change)
    if instance is None or worker.engine is None or worker.engine.no_transfer is not None:
        return None
    return WorkerRoom(worker.lease, instance, int(worker.engine.max_num_seqs - instance.batch))


def plan(
    rooms: Collection[WorkerRoom], candidates: Iterable[Candidate], limits: RebalancingLimits
) -> tuple[PlannedMigration, ...]:
    """The moves to be made now, in order; none if all is well, or nothing helps."""
    board = _Board(rooms, candidates, limits)
    while len(board.transfers) < limits.at_once and (board.relieve() or board.make_room()):
        pass
    return tuple(board.transfers[: limits.at_once])


class _Board:
    """The workers as they would be after the moves decided so far."""

    def __init__(self, rooms: Iterable[WorkerRoom], candidates: Iterable[Candidate], limits: RebalancingLimits) -> None:
        self._limits = limits
        self._rooms = {room.lease: room for room in rooms}
        self._candidates: defaultdict[str, list[Candidate]] = defaultdict(list)
        for candidate in sorted(candidates, key=lambda one: (-one.priority, one.tokens, one.request_id)):
            self._candidates[candidate.worker].append(candidate)
        self.transfers: list[PlannedMigration] = []

    def relieve(self) -> bool:
        """One move from the least free worker that has something to give. False: there is none to be made."""
        takers = [room for room in self._rooms.values() if room.freeness > self._limits.takes_from]
        givers = [room for room in self._rooms.values() if room.freeness < self._limits.below]
        return any(
            self._move(giver, candidate, takers, "rebalance")
            for giver in sorted(givers, key=lambda room: (room.freeness, room.lease))
            for candidate in self._candidates[giver.lease]
        )

    def make_room(self) -> bool:
        """Let in the first request of a queue. False: there is none that could be let in so."""
        blocked = [room for room in self._rooms.values() if room.is_blocked]
        return any(self._let_in(room) for room in sorted(blocked, key=lambda room: (room.freeness, room.lease)))

    def _let_in(self, blocked: WorkerRoom) -> bool:
        rooms, candidates, transfers = dict(self._rooms), self._candidates[blocked.lease], self.transfers
        self._candidates[blocked.lease], self.transfers = list(candidates), list(transfers)
        for candidate in candidates:
            takers = [room for room in self._rooms.values() if room.instance.head_tokens == 0]
            self._move(self._rooms[blocked.lease], candidate, takers, "room")
            if not self._rooms[blocked.lease].is_blocked:
                return True
        # What is not enough is not worth it.
        self._rooms, self._candidates[blocked.lease], self.transfers = rooms, candidates, transfers
        return False

    def _move(self, giver: WorkerRoom, candidate: Candidate, takers: Iterable[WorkerRoom], reason: Reason) -> bool:
        floor = max(self._limits.below, giver.freeness)
        able = [taker for taker in takers if taker.lease != giver.lease and _takes(taker, candidate, floor)]
        if not able:
            return False
        taker = max(able, key=lambda room: (room.freeness, room.lease))
        self._rooms[giver.lease] = giver.changed(-candidate.tokens, -1)
        self._rooms[taker.lease] = taker.changed(candidate.tokens, 1)
        self._candidates[giver.lease].remove(candidate)
        self.transfers.append(PlannedMigration(candidate.request_id, giver.lease, taker.lease, reason, floor))
        return True


def _takes(taker: WorkerRoom, candidate: Candidate, floor: float) -> bool:
    after = taker.changed(candidate.tokens, 1)
    return taker.slots >= 1 and after.free_tokens >= 0 and after.freeness >= floor
