"""Pulls the planner's observations from the board, the statefile, presences and prefill queues.

Reads only: a stream that does not exist is not created. What cannot be read is unknown, never zero."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dynamo_local.bus.jetstream.prefill_queue import PrefillQueue
from dynamo_local.bus.nats import Bus
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core.errors import BusError, NotRunningError, StateError
from dynamo_local.core.fleet.view import ENGINE_ROLES, PREFILL_ROLE, in_flight_of, routing_of, ttl_s
from dynamo_local.core.messages.endpoints import Board, EndpointView
from dynamo_local.core.messages.presence import Presence, as_received
from dynamo_local.core.messages.work import QueueLength
from dynamo_local.core.migration.protocol import migrations_of
from dynamo_local.core.names import FIRST_OF_MAIN, MAIN, endpoint_of
from dynamo_local.core.planning.window import (
    Claim,
    EndpointSeen,
    Fleet,
    Observation,
    main_of,
    observe,
    recomputed_of,
    worker_roles,
)
from dynamo_local.core.shares import summed
from dynamo_local.core.subjects import Subjects
from dynamo_local.log_once import LogOnce
from state.endpoints.board import read_board
from state.locks import server_pid
from state.statefile.model import State
from state.statefile.store import StateStore

_log = logging.getLogger(__name__)


# Reads a running server's statefile for the planner. What cannot be read is unknown, and logged once.


@dataclass(frozen=True)
class ServerState:
    """The claims of all workers and the number of devices for the server, at one moment."""

    claims: tuple[Claim, ...]
    inventory: int

    def claims_of(self, endpoint: str) -> tuple[Claim, ...]:
        """The claims of an endpoint's workers, of all its revisions."""
        return tuple(each for each in self.claims if each.endpoint == endpoint)

    @property
    def devices(self) -> float:
        """Devices that all workers hold together."""
        return summed(claim.devices for claim in self.claims)


class StateReader:
    """`inventory` returns the number of devices for the server of a state; a call may block for milliseconds."""

    def __init__(self, store: StateStore, inventory: Callable[[State], int]) -> None:
        self.paths = store.paths
        self._store = store
        self._inventory = inventory
        self._failure = LogOnce(_log)

    async def read(self) -> ServerState | None:
        """Return None if the statefile cannot be read. Raises NotRunningError when the server has ended."""

        def read() -> ServerState:
            state = self._store.read()
            return ServerState(claims_of(state), self._inventory(state))

        try:
            found = await asyncio.to_thread(read)
        except (NotRunningError, StateError) as error:
            if isinstance(error, NotRunningError) and await asyncio.to_thread(server_pid, self.paths) is None:
                raise
            self._failure.warn(f"the statefile cannot be read: {error}")
            return None
        self._failure.clear()
        return found


def claims_of(state: State) -> tuple[Claim, ...]:
    """Return the claims of workers that run, start, restart or end."""
    return tuple(
        Claim(
            *(name, component.role, component.device_count),
            retiring=component.phase == "retiring",
            endpoint=endpoint_of(component.revision),
        )
        for name, component in state.components.items()
        if component.holds and component.role in ENGINE_ROLES
    )


# Reads the length of a prefill queue for observations.


class QueueReader:
    """Reads one queue, at each pull."""

    def __init__(self, bus: Bus, subjects: Subjects) -> None:
        self._bus = bus
        self._queue = PrefillQueue(bus, subjects)
        self._whose = f" of {subjects.revision}" if subjects.revision else ""
        self._failure = LogOnce(_log)

    async def read(self) -> QueueLength | None:
        """Return the queue's length; None if it cannot be read, which is logged once."""
        if not self._bus.connected:
            return None
        try:
            found = await self._queue.length()
        except BusError as error:
            self._failure.warn(f"the prefill queue{self._whose} cannot be read: {error}")
            return None
        self._failure.clear()
        return found


# Follows the numbers of requests in flight that frontends announce in the revisions they serve.


class FrontendsWatch:
    """The last presence of each frontend in each revision. A FleetWatch of all endpoints follows their workers."""

    def __init__(self, bus: Bus, subjects: Subjects, clock: Callable[[], float] = time.monotonic) -> None:
        self._bus = bus
        self._subjects = subjects
        self._clock = clock
        self._heard: dict[str, dict[str, tuple[Presence, float]]] = {}
        """By revision and watcher, with the time (CLOCK_MONOTONIC, s)."""

    async def start(self) -> None:
        """Listen, and ask all processes to publish their presence now."""
        await self._bus.listen_each(self._subjects.presences_in_revisions, Presence, self._on_presence)
        await self._bus.publish(self._subjects.probe_of_all, b"")

    def in_flight(self, revision: str) -> int | None:
        """Requests of that revision that its frontends have admitted and not finished. None if there is no frontend, or
        one of them tells no number."""
        return in_flight_of(self._living(revision))

    def held(self, revision: str) -> int | None:
        """Sequences in flight that wait for a worker. None as in `in_flight`."""
        counts = [presence.counts for presence in self._living(revision)]
        known = [each.held for each in counts if each is not None and each.held is not None]
        return sum(known) if counts and len(known) == len(counts) else None

    def queued(self, revision: str) -> int:
        """Asynchronous tasks that no frontend has in hand. All frontends know all tasks, as they are in one store."""
        counts = [presence.counts for presence in self._living(revision) if presence.counts is not None]
        known = max(((each.queued or 0) + (each.taken or 0) for each in counts), default=0)
        return max(0, known - sum(each.taken or 0 for each in counts))

    def forget_others(self, revisions: set[str]) -> None:
        """Forget the revisions that are not among these."""
        for revision in self._heard.keys() - revisions:
            del self._heard[revision]

    def _living(self, revision: str) -> list[Presence]:
        now = self._clock()
        return [presence for presence, at in self._heard.get(revision, {}).values() if now - at <= ttl_s(presence)]

    async def _on_presence(self, revision: str, presence: Presence) -> None:
        now = self._clock()
        self._heard.setdefault(revision, {})[presence.watcher] = as_received(presence, now), now


class ServerMetrics:
    """Pulls observations of one running server. `watch` follows the workers of all endpoints; both watches are started
    and run by their owner.

    `templates`: by role, the service whose workers start in it; empty if the graph has no workers of its own.
    """

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        watch: FleetWatch,
        frontends: FrontendsWatch,
        state: StateReader,
        templates: Mapping[str, str],
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._watch = watch
        self._frontends = frontends
        self._state = state
        self._templates = {role: service for role, service in templates.items() if role in ENGINE_ROLES}
        self._board = Board()
        self._queues: dict[str, QueueReader] = {}
        """By revision."""

    async def pull(self) -> Observation:
        """Return an observation of all endpoints now. Raises NotRunningError when the server has ended."""
        state = await self._state.read()
        # One that cannot be read for a moment is as it was.
        read = await asyncio.to_thread(read_board, self._state.paths)
        board = self._board = self._board if read is None else read
        serving = {endpoint_of(each.revision): each.revision for each in board.revisions if each.takes_requests}
        self._frontends.forget_others(set(serving.values()))
        queues = await self._read_queues(serving)
        if not self._bus.connected:
            # After the awaits above, during which the connection may have been lost.
            state = None
        at, view = time.monotonic(), self._watch.view
        members, routable = tuple(view.members()), tuple(view.ready(ENGINE_ROLES))

        def fleet(name: str, templates: Mapping[str, str]) -> Fleet:
            claims = None if state is None else state.claims_of(name)
            return observe(at, claims, members, routable, queues.get(name), templates)

        seen = [
            self._seen(each, fleet(each.spec.name, dict.fromkeys(worker_roles(each.spec), "")), serving)
            for each in board.endpoints
        ]
        return Observation(
            at,
            (*([main_of(fleet(MAIN, self._templates))] if self._templates else ()), *seen),
            None if state is None else state.devices,
            None if state is None else state.inventory,
            board.number,
            migrations_of(members),
            routing_of(members),
            recomputed_of(members),
        )

    def _seen(self, view: EndpointView, fleet: Fleet, serving: Mapping[str, str]) -> EndpointSeen:
        revision, frontends = serving.get(view.spec.name), self._frontends
        if fleet.workers is None or revision is None:
            return EndpointSeen(view, fleet)
        return EndpointSeen(
            view, fleet, frontends.in_flight(revision), frontends.held(revision), frontends.queued(revision)
        )

    async def _read_queues(self, serving: Mapping[str, str]) -> dict[str, QueueLength | None]:
        """Return the lengths of the prefill queues, by endpoint."""
        revisions = {
            view.spec.name: serving[view.spec.name]
            for view in self._board.endpoints
            if view.spec.disaggregated and view.spec.name in serving
        }
        if PREFILL_ROLE in self._templates:
            revisions[MAIN] = serving.get(MAIN, FIRST_OF_MAIN)
        for revision in revisions.values():
            if revision not in self._queues:
                self._queues[revision] = QueueReader(self._bus, Subjects(self._subjects.namespace, revision))
        self._queues = {revision: self._queues[revision] for revision in revisions.values()}
        lengths = await asyncio.gather(*(self._queues[revision].read() for revision in revisions.values()))
        return dict(zip(revisions, lengths, strict=True))
