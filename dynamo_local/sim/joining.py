"""A worker that joins a simulated fleet, and has its cache filled as `components/workers/warming` does it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from dynamo_local.core.messages.hot_prefixes import MOST_TOLD_BLOCKS, MOST_TOLD_TOKENS, Origin
from dynamo_local.core.priority.classes import MOST_PRIORITY
from dynamo_local.core.routing.caches.hot_prefixes import PORTION_BLOCKS, HotChain, HotPrefixes, hottest_of_all
from dynamo_local.core.routing.caches.index import key_of
from dynamo_local.engine.mocker.settings import MockerSettings
from dynamo_local.sim.events import Agenda
from dynamo_local.sim.outcomes import Served
from dynamo_local.sim.requests import Arrival
from dynamo_local.sim.worker import Worker

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
