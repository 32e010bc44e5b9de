"""Moves requests of a simulated fleet as frontends do: by the production decisions, with warm requests and a cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import msgspec

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
from dynamo_local.engine.mocker.settings import MockerSettings
from dynamo_local.sim.events import Agenda
from dynamo_local.sim.messages import Messages
from dynamo_local.sim.outcomes import Served
from dynamo_local.sim.requests import Arrival
from dynamo_local.sim.routers import presence_of
from dynamo_local.sim.worker import Worker

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
