"""A simulated server: endpoints that take turns on fewer devices, by the policy of core/endpoints/turns. Time is
simulated; requests of an endpoint run side by side."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from dynamo_local.core.endpoints.turns import Claim, Contender, Limits, Turns, take_turns

Policy = Callable[[Sequence[Contender], dict[int, float], float], Turns]
"""Decides by contenders, free devices and the time."""

_Phase = Literal["asleep", "starting", "ready", "ending"]


@dataclass(frozen=True, order=True)
class Arrival:
    """A request: when it comes, for which endpoint, and how long it runs, in seconds."""

    at: float
    endpoint: str
    runs_s: float


@dataclass(frozen=True)
class Swap:
    """A start of an endpoint: when it began."""

    at: float
    endpoint: str


@dataclass
class Outcome:
    """What came of all arrivals. `waits`: time of each request until it ran, in seconds, in order of its start."""

    waits: list[float] = field(default_factory=list)
    swaps: list[Swap] = field(default_factory=list)
    longest_queue: int = 0
    ended_at: float = 0.0


@dataclass
class _Endpoint:
    name: str
    phase: _Phase = "asleep"
    device: int = -1
    held: list[Arrival] = field(default_factory=list)
    running: int = 0
    turn_since: float | None = None
    idle_since: float | None = None

    def contender(self) -> Contender:
        claim = (Claim(self.name, (self.device,)),)
        present = self.phase in ("starting", "ready")
        return Contender(
            self.name,
            workers=claim if present else (),
            ending=claim if self.phase == "ending" else (),
            running=self.running,
            idle_since=self.idle_since if present else None,
            turn_since=self.turn_since,
            needs=() if present else (1.0,),
            waits_since=self.held[0].at if self.held and not present else None,
        )


@dataclass
class World:
    """Endpoints on devices. `start_s`: time of a start; `end_s`: until the device of a worker that ends is free."""

    endpoints: Iterable[str]
    devices: int
    start_s: float = 0.5
    end_s: float = 0.05
    policy: Policy = field(default=lambda contenders, free, now: take_turns(contenders, free, now, Limits()))

    def run(self, arrivals: Iterable[Arrival]) -> Outcome:
        """Serve all of them to the end."""
        run = _Run(self)
        for arrival in arrivals:
            run.at(arrival.at, partial(run.arrive, arrival))
        return run.to_end()


class _Run:
    def __init__(self, world: World) -> None:
        self._world = world
        self._endpoints = {name: _Endpoint(name) for name in world.endpoints}
        self._free = dict.fromkeys(range(world.devices), 1.0)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._looks: set[float] = set()
        self._number = 0
        self._now = 0.0
        self._outcome = Outcome()

    def at(self, when: float, what: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (when, self._number, what))

    def to_end(self) -> Outcome:
        while self._events:
            self._now, _, what = heapq.heappop(self._events)
            what()
            self._decide()
        assert not any(each.held or each.running for each in self._endpoints.values()), "a request was lost"
        self._outcome.ended_at = self._now
        return self._outcome

    def arrive(self, arrival: Arrival) -> None:
        endpoint = self._endpoints[arrival.endpoint]
        endpoint.held.append(arrival)
        endpoint.idle_since = None

    def _decide(self) -> None:
        turns = self._world.policy([each.contender() for each in self._endpoints.values()], dict(self._free), self._now)
        self._outcome.longest_queue = max(self._outcome.longest_queue, len(turns.waits))
        for each in turns.yields:
            if not each.finishing:
                self._end(self._endpoints[each.endpoint])
        for endpoint in self._endpoints.values():
            if endpoint.phase == "ready" and endpoint.name not in turns.closed:
                self._take(endpoint)
            if endpoint.phase == "asleep" and endpoint.name in turns.reserved.keys() - turns.waits.keys():
                (device,) = turns.reserved[endpoint.name]
                self._start(endpoint, device)
        if turns.look_at is not None and turns.look_at not in self._looks:
            self._looks.add(turns.look_at)
            self.at(turns.look_at, lambda: None)

    def _take(self, endpoint: _Endpoint) -> None:
        for arrival in endpoint.held:
            self._outcome.waits.append(self._now - arrival.at)
            endpoint.running += 1
            self.at(self._now + arrival.runs_s, lambda: self._finish(endpoint))
        endpoint.held.clear()

    def _finish(self, endpoint: _Endpoint) -> None:
        endpoint.running -= 1
        if not endpoint.running and not endpoint.held:
            endpoint.idle_since = self._now

    def _start(self, endpoint: _Endpoint, device: int) -> None:
        assert self._free[device] == 1, "a device is given twice"
        self._free[device] = 0.0
        endpoint.phase, endpoint.device = "starting", device
        self._outcome.swaps.append(Swap(self._now, endpoint.name))
        self.at(self._now + self._world.start_s, lambda: self._ready(endpoint))

    def _ready(self, endpoint: _Endpoint) -> None:
        endpoint.phase, endpoint.turn_since = "ready", self._now

    def _end(self, endpoint: _Endpoint) -> None:
        endpoint.phase, endpoint.turn_since, endpoint.idle_since = "ending", None, None
        self.at(self._now + self._world.end_s, lambda: self._ended(endpoint))

    def _ended(self, endpoint: _Endpoint) -> None:
        endpoint.phase = "asleep"
        self._free[endpoint.device] = 1.0
