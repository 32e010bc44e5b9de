"""A simulated fleet: requests arrive, a router places them, workers serve them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from dynamo_local.core.ports import CacheChanges
from dynamo_local.engine.mocker.settings import MockerSettings
from dynamo_local.sim.events import Agenda
from dynamo_local.sim.outcomes import Gaps, Served
from dynamo_local.sim.requests import Arrival
from dynamo_local.sim.timing import Timing
from dynamo_local.sim.worker import Watcher, Worker


@dataclass(frozen=True)
class Placement:
    """A worker for a request. `cached`: tokens that it is expected to have; `pull_from`: who has more of them."""

    worker: str
    cached: int = 0
    pull_from: str | None = None


class Router(Protocol):
    """Places requests, and is told what becomes of them and of the workers' caches."""

    def place(self, arrival: Arrival, now: float) -> Placement: ...

    def first_token(self, arrival: Arrival, worker: str) -> None: ...

    def ended(self, arrival: Arrival, worker: str) -> None: ...

    def cache_changed(self, worker: str, changes: CacheChanges) -> None: ...


@dataclass(frozen=True)
class Result:
    """All requests, in order of arrival, and the gaps between their tokens."""

    served: tuple[Served, ...]
    gaps: Gaps
    workers: tuple[Worker, ...]


def names(workers: int) -> list[str]:
    """Names of simulated workers."""
    return [f"w{number:04}" for number in range(workers)]


def simulate(
    arrivals: Iterable[Arrival], router: Router, workers: int, settings: MockerSettings, timing: Timing
) -> Result:
    """Serve all requests to their ends. Raises ValueError for a request that no worker could ever run."""
    fleet = _Fleet(router, workers, settings, timing)
    return fleet.run(sorted(arrivals, key=lambda arrival: (arrival.at, arrival.number)))


class _Fleet:
    def __init__(self, router: Router, workers: int, settings: MockerSettings, timing: Timing) -> None:
        self._router = router
        self._settings = settings
        self._agenda = Agenda()
        self._gaps = Gaps()
        watcher = Watcher(self._first_token, self._ended, router.cache_changed)
        self._workers = {
            name: Worker(name, settings, timing, self._agenda, watcher, self._gaps) for name in names(workers)
        }

    def run(self, arrivals: Sequence[Arrival]) -> Result:
        for arrival in arrivals:
            if not 0 < arrival.prompt_tokens < self._settings.context_limit or arrival.output_tokens < 1:
                raise ValueError(f"request {arrival.number} of {arrival.prompt_tokens} tokens fits no worker")
        served = [Served(arrival) for arrival in arrivals]
        self._next(served, 0)
        self._agenda.run()
        return Result(tuple(served), self._gaps, tuple(self._workers.values()))

    def _next(self, served: Sequence[Served], index: int) -> None:
        """Have the request with that index arrive, and then the next one."""
        if index < len(served):
            self._agenda.at(served[index].arrival.at, lambda: self._arrive(served, index))

    def _arrive(self, served: Sequence[Served], index: int) -> None:
        each = served[index]
        placement = self._router.place(each.arrival, self._agenda.now)
        each.worker, each.predicted = placement.worker, placement.cached
        source = None if placement.pull_from is None else self._workers[placement.pull_from]
        self._workers[placement.worker].submit(each, source)
        self._next(served, index + 1)

    def _first_token(self, served: Served) -> None:
        self._router.first_token(served.arrival, served.worker)

    def _ended(self, served: Served) -> None:
        self._router.ended(served.arrival, served.worker)
