"""A simulated fleet: its messages, workers that join it, its rebalancer, and the run of all requests through it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from dynamo_local.core.beats import BEAT_S
from dynamo_local.core.messages.kv import MOST_TOLD_BLOCKS, MOST_TOLD_TOKENS, Origin
from dynamo_local.core.messages.presence import Load, Presence
from dynamo_local.core.migration.protocol import InFlightMigration, InFlightMigrations
from dynamo_local.core.migration.rebalancing import (
    Candidate,
    PlannedMigration,
    RebalancingLimits,
    ThrashWatch,
    WorkerRoom,
    plan,
    room_of,
)
from dynamo_local.core.ports import CacheChanges
from dynamo_local.core.priority.classes import MOST_PRIORITY
from dynamo_local.core.routing.caches.hot_prefixes import PORTION_BLOCKS, HotChain, HotPrefixes, hottest_of_all
from dynamo_local.core.routing.caches.index import key_of
from dynamo_local.engine.mocker.settings import MockerSettings
from dynamo_local.sim.requests import Arrival, Gaps, Served
from dynamo_local.sim.routers import Placement, presence_of
from dynamo_local.sim.worker import Action, Agenda, Timing, Watcher, Worker

# How long messages take in a simulated fleet.


@dataclass(frozen=True)
class Messages:
    """Times in seconds: `to_worker_s` from the client's request until the worker has it, `from_worker_s` from what a
    worker does until client, frontend and router know it. A migration takes both twice more: once its destination has
    read, and once it is cut."""

    to_worker_s: float = 0.0
    from_worker_s: float = 0.0

    @property
    def round_trip_s(self) -> float:
        return self.to_worker_s + self.from_worker_s


AT_ONCE = Messages()


# A worker that joins a simulated fleet, and has its cache filled as `components/workers/warming` does it.

_HEARD_S = 0.2
"""Time for a new worker to hear of the others, and for their answers."""

_ROUND_TRIP_S = 0.005
"""Time of the messages for a portion, beside the transfer and the steps."""

_LOOK_AGAIN_S = 0.1
_WITHIN_S = 30.0
_ALL = Origin()


@dataclass(frozen=True)
class Joining:
    """The fleet's last worker joins at this time, in seconds. `share`: fraction of its cache that is filled; 0: none.
    `joins`: called with its name then, for the router."""

    at: float
    share: float
    joins: Callable[[str], None]


class SimulatedWarmUp:
    """Counts what workers are asked for, and fills the cache of `worker`."""

    def __init__(self, agenda: Agenda, workers: Mapping[str, Worker], worker: Worker, settings: MockerSettings) -> None:
        self._agenda = agenda
        self._workers = workers
        self._worker = worker
        self._settings = settings
        self._asked = {name: HotPrefixes() for name in workers}
        self._until = 0.0
        self._portions = 0
        self._room = 0

    def taken(self, arrival: Arrival, worker: str) -> None:
        """Count a request."""
        count = (arrival.prompt_tokens - 1) // self._settings.mocker_block_size
        self._asked[worker].ask(_ALL, arrival.hashes(count), self._agenda.now)

    def begin(self, share: float) -> None:
        """Fill the cache from now on."""
        self._room = int(self._settings.mocker_kv_blocks * share)
        self._until = self._agenda.now + _WITHIN_S
        self._agenda.at(self._agenda.now + _HEARD_S, self._ask)

    def _ask(self) -> None:
        now, block_tokens = self._agenda.now, self._settings.mocker_block_size
        most = min(MOST_TOLD_BLOCKS, MOST_TOLD_TOKENS // block_tokens)
        told = {
            name: asked.tell(most, block_tokens, now)
            for name, asked in self._asked.items()
            if name != self._worker.name
        }
        self._next(self._orders(hottest_of_all(told, self._room, now)))

    def _orders(self, chains: Iterator[tuple[HotChain, str]]) -> Iterator[tuple[Arrival, Worker]]:
        """Portions that are to be brought, each with its source, as far as that has it when it is asked."""
        for chain, source in chains:
            keys = tuple(map(key_of, chain.blocks))
            had = len(self._worker.scheduler.pool.match(chain.blocks))
            while had < len(keys):
                had = min(had + PORTION_BLOCKS, len(keys))
                if len(self._workers[source].scheduler.pool.match(chain.blocks[:had])) < had:
                    break
                self._portions += 1
                prompt = had * self._settings.mocker_block_size + 1
                yield Arrival(-self._portions, 0.0, prompt, 1, keys[:had], MOST_PRIORITY), self._workers[source]

    def _next(self, orders: Iterator[tuple[Arrival, Worker]]) -> None:
        now, worker = self._agenda.now, self._worker
        if now >= self._until:
            return
        if worker.load.waiting:
            self._agenda.at(now + _LOOK_AGAIN_S, lambda: self._next(orders))
            return
        order = next(orders, None)
        if order is None:
            return
        arrival, source = order
        pool = worker.scheduler.pool
        lacking = len(arrival.keys) - len(pool.match(arrival.hashes(len(arrival.keys))))
        if pool.cached + lacking <= self._room:
            worker.warm(Served(arrival, now, worker.name), source, self._after_round_trip(orders))

    def _after_round_trip(self, orders: Iterator[tuple[Arrival, Worker]]) -> Callable[[], None]:
        return lambda: self._agenda.at(self._agenda.now + _ROUND_TRIP_S, lambda: self._next(orders))


# Moves requests of a simulated fleet as frontends do: by the production decisions, with warm requests and a cut.

Moved = Callable[[Arrival, str, int, float], None]
_OF_A_SOURCE, _IN_ALL = 4, 8


class SimulatedRebalancer:
    """Moves requests by the loads that workers report."""

    def __init__(
        self,
        agenda: Agenda,
        workers: Mapping[str, Worker],
        settings: MockerSettings,
        limits: RebalancingLimits,
        moved: Moved,
        messages: Messages,
    ) -> None:
        self._agenda = agenda
        self._workers = workers
        self._limits = limits
        self._moved = moved
        self._round_trip_s = messages.round_trip_s
        self._presences = {name: presence_of(name, settings) for name in workers}
        self._thrash_watch = ThrashWatch()
        self._in_flight = InFlightMigrations()
        self._moving: dict[int, str] = {}
        """Reasons of migrations in progress, by the numbers of the requests."""
        self._moved_at: dict[int, float] = {}
        self.reasons: list[str] = []
        """Of all completed migrations."""

    def look(self, loads: Mapping[str, Load]) -> None:
        """Begin the migrations that these loads of the workers ask for."""
        now = self._agenda.now
        told = [msgspec.structs.replace(self._presences[name], load=load) for name, load in loads.items()]
        served = {str(live.served.arrival.number): live.served for w in self._workers.values() for live in w.decoding()}
        for planned in plan(self._rooms(told, now), self._candidates(now), self._limits):
            if self._in_flight.leaving(planned.source) < _OF_A_SOURCE and self._in_flight.in_progress < _IN_ALL:
                self._begin(served[planned.request_id], planned)

    def _rooms(self, told: list[Presence], now: float) -> list[WorkerRoom]:
        thrashing = self._thrash_watch.look(told, now)
        known = [room_of(each, now, self._in_flight.change(each)) for each in told]
        return [replace(room, thrashing=room.lease in thrashing) for room in known if room is not None]

    def _candidates(self, now: float) -> list[Candidate]:
        return [
            Candidate(str(served.arrival.number), name, live.sequence.length, served.arrival.priority, served.drawn)
            for name, worker in self._workers.items()
            for live in worker.decoding()
            if self._may_move(served := live.served, now)
        ]

    def _may_move(self, served: Served, now: float) -> bool:
        number = served.arrival.number
        return number not in self._moving and now - self._moved_at.get(number, -1e9) >= self._limits.period_s

    def _begin(self, served: Served, planned: PlannedMigration) -> None:
        source, destination = self._workers[planned.source], self._workers[planned.destination]
        self._moving[served.arrival.number] = planned.reason
        tokens = served.arrival.prompt_tokens + served.drawn
        entry = self._in_flight.begin(source.name, destination.name, tokens, self._agenda.now)

        def cut() -> None:
            source.after_step(lambda: self._cut(served, source, destination, entry))

        destination.warm(served, source, lambda: self._agenda.after(self._round_trip_s, cut))

    def _cut(self, served: Served, source: Worker, destination: Worker, entry: InFlightMigration) -> None:
        now, reason = self._agenda.now, self._moving.pop(served.arrival.number)
        last_token_at = source.give_up(served)
        self._in_flight.end(entry, now, moved=last_token_at is not None)
        if last_token_at is not None:
            self._moved_at[served.arrival.number] = now
            self.reasons.append(reason)
            served.moved += 1
            served.worker = destination.name
            self._moved(served.arrival, destination.name, served.arrival.prompt_tokens + served.drawn, now)
            self._agenda.after(self._round_trip_s, lambda: destination.take_over(served, last_token_at))


# A simulated fleet: requests arrive, a router places them, workers serve them.


class Router(Protocol):
    """Places requests, and is told what becomes of them and of the workers' caches."""

    def place(self, arrival: Arrival, now: float) -> Placement: ...

    def first_token(self, arrival: Arrival) -> None: ...

    def ended(self, arrival: Arrival) -> None: ...

    def cache_changed(self, worker: str, changes: CacheChanges) -> None: ...

    def moved(self, arrival: Arrival, worker: str, tokens: int, now: float) -> None: ...

    @property
    def needs_loads(self) -> bool:
        """Whether it looks at the loads that workers report."""
        ...

    def reported(self, loads: Mapping[str, Load]) -> None: ...


@dataclass(frozen=True)
class Result:
    """All requests, in order of arrival, and the gaps between their tokens."""

    served: tuple[Served, ...]
    gaps: Gaps
    workers: tuple[Worker, ...]
    moves: tuple[str, ...] = ()
    """Reasons of the migrations."""


def names(workers: int) -> list[str]:
    """Names of simulated workers."""
    return [f"w{number:04}" for number in range(workers)]


def simulate(
    arrivals: Iterable[Arrival],
    router: Router,
    workers: int,
    settings: MockerSettings,
    timing: Timing | Mapping[str, Timing],
    rebalancing: RebalancingLimits | None = None,
    joining: Joining | None = None,
    messages: Messages = AT_ONCE,
) -> Result:
    """Serve all requests to their ends. Raises ValueError for a request that no worker could ever run.

    `timing`: of all workers, or of each by its name. `rebalancing`: when requests migrate; None: never. `joining`: how
    the last worker, which the router does not know yet, joins the others; None: it is no other than they. `messages`:
    what messages take; by default no time."""
    fleet = _Fleet(router, workers, settings, timing, messages)
    if joining is not None:
        fleet.have_join(joining)
    if rebalancing is not None:
        fleet.rebalance(rebalancing)
    return fleet.run(sorted(arrivals, key=lambda arrival: (arrival.at, arrival.number)))


class _Fleet:
    def __init__(
        self,
        router: Router,
        workers: int,
        settings: MockerSettings,
        timing: Timing | Mapping[str, Timing],
        messages: Messages,
    ) -> None:
        self._router = router
        self._messages = messages
        self._settings = settings
        self._agenda = Agenda()
        self._gaps = Gaps()
        self._served: list[Served] = []
        self._rebalancer: SimulatedRebalancer | None = None
        self._warm_up: SimulatedWarmUp | None = None
        watcher = Watcher(self._first_token, self._ended, self._cache_changed)
        times = timing if isinstance(timing, Mapping) else dict.fromkeys(names(workers), timing)
        self._workers = {
            name: Worker(name, settings, times[name], self._agenda, watcher, self._gaps) for name in names(workers)
        }

    def rebalance(self, limits: RebalancingLimits) -> None:
        """Have requests migrate."""
        self._rebalancer = SimulatedRebalancer(
            self._agenda, self._workers, self._settings, limits, self._router.moved, self._messages
        )

    def have_join(self, joining: Joining) -> None:
        """Have the last worker join."""
        name, worker = list(self._workers.items())[-1]
        warm_up = self._warm_up = SimulatedWarmUp(self._agenda, self._workers, worker, self._settings)

        def join() -> None:
            joining.joins(name)
            warm_up.begin(joining.share)

        self._agenda.at(joining.at, join)

    def run(self, arrivals: Sequence[Arrival]) -> Result:
        self._next(arrivals, 0)
        if self._rebalancer is not None or self._router.needs_loads:
            self._agenda.at(self._agenda.now, self._report)
        self._agenda.run()
        moves = () if self._rebalancer is None else tuple(self._rebalancer.reasons)
        return Result(tuple(self._served), self._gaps, tuple(self._workers.values()), moves)

    def _report(self) -> None:
        """Have all workers report their loads, as they do twice a second, for as long as anything else happens."""
        loads = {name: worker.load for name, worker in self._workers.items()}
        self._router.reported(loads)
        if self._rebalancer is not None:
            self._rebalancer.look(loads)
        for worker in self._workers.values():
            # What is computed at once is seen once it is over.
            worker.after_step(_nothing)
        if not self._agenda.is_empty:
            self._agenda.at(self._agenda.now + BEAT_S, self._report)

    def _next(self, arrivals: Sequence[Arrival], index: int) -> None:
        """Have the request with that index arrive, and then the next one."""
        if index < len(arrivals):
            self._agenda.at(arrivals[index].at, lambda: self._arrive_in_order(arrivals, index))

    def _arrive_in_order(self, arrivals: Sequence[Arrival], index: int) -> None:
        self._arrive(arrivals[index])
        self._next(arrivals, index + 1)

    def _arrive(self, arrival: Arrival) -> None:
        if not 0 < arrival.prompt_tokens < self._settings.context_limit or arrival.output_tokens < 1:
            raise ValueError(f"request {arrival.number} of {arrival.prompt_tokens} tokens fits no worker")
        placement = self._router.place(arrival, self._agenda.now)
        served = Served(arrival, self._agenda.now, placement.worker, predicted=placement.cached)
        self._served.append(served)
        if self._warm_up is not None:
            self._warm_up.taken(arrival, placement.worker)
        source = None if placement.pull_from is None else self._workers[placement.pull_from]
        worker = self._workers[placement.worker]
        self._agenda.after(self._messages.to_worker_s, lambda: worker.submit(served, source))

    def _first_token(self, served: Served) -> None:
        served.first_token_at = self._agenda.now + self._messages.from_worker_s
        self._heard(lambda: self._router.first_token(served.arrival))

    def _ended(self, served: Served) -> None:
        served.ended_at = self._agenda.now + self._messages.from_worker_s
        self._heard(lambda: self._answered(served))

    def _cache_changed(self, worker: str, changes: CacheChanges) -> None:
        self._heard(lambda: self._router.cache_changed(worker, changes))

    def _heard(self, action: Action) -> None:
        """Do it when what a worker does now is known."""
        self._agenda.after(self._messages.from_worker_s, action)

    def _answered(self, served: Served) -> None:
        self._router.ended(served.arrival)
        then = served.arrival.then
        if then is not None:
            self._agenda.at(self._agenda.now + then.at, lambda: self._arrive(then))


def _nothing() -> None:
    pass
