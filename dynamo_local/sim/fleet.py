"""A simulated fleet: requests arrive, a router places them, workers serve them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from dynamo_local.core.beats import BEAT_S
from dynamo_local.core.messages.presence import Load
from dynamo_local.core.migration.rebalancing import RebalancingLimits
from dynamo_local.core.ports import CacheChanges
from dynamo_local.engine.mocker.settings import MockerSettings
from dynamo_local.sim.events import Action, Agenda
from dynamo_local.sim.joining import Joining, SimulatedWarmUp
from dynamo_local.sim.messages import AT_ONCE, Messages
from dynamo_local.sim.outcomes import Gaps, Served
from dynamo_local.sim.rebalancer import SimulatedRebalancer
from dynamo_local.sim.requests import Arrival
from dynamo_local.sim.routers import Placement
from dynamo_local.sim.timing import Timing
from dynamo_local.sim.worker import Watcher, Worker


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
