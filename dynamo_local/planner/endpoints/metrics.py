"""Pulls observations of all endpoints from the board, the statefile, presences and prefill queues.

Reads only. What cannot be read is unknown, never zero.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dynamo_local.bus.nats import Bus
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core.fleet.view import ENGINE_ROLES
from dynamo_local.core.messages.endpoints import Board, EndpointView
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.names import endpoint_of
from dynamo_local.core.planning.endpoints.observation import EndpointSeen, EndpointsObservation, roles_of
from dynamo_local.core.planning.observation import QueueReading, observe
from dynamo_local.core.subjects import Subjects
from dynamo_local.planner.endpoints.frontends import FrontendsWatch
from dynamo_local.planner.queue_reader import QueueReader
from dynamo_local.planner.server_state import ServerState, StateReader
from state.endpoints.board import read_board
from state.paths import StatePaths


@dataclass(frozen=True)
class Sources:
    """What endpoints are observed by. `watch` follows the workers of all endpoints; both watches are started and run by
    their owner. `promised` returns the devices that the graph's own workers are about to hold."""

    bus: Bus
    subjects: Subjects
    watch: FleetWatch
    frontends: FrontendsWatch
    state: StateReader
    paths: StatePaths
    promised: Callable[[], float] = lambda: 0
    clock: Callable[[], float] = time.monotonic


@dataclass(frozen=True)
class _Fleet:
    """The workers of all endpoints with a presence, and those that may be given work."""

    members: tuple[Presence, ...]
    routable: tuple[Presence, ...]


class EndpointMetrics:
    """Pulls observations of the endpoints of one running server."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._board = Board()
        self._queues_of: dict[str, QueueReader] = {}

    async def pull(self) -> EndpointsObservation:
        """Return an observation of all endpoints now. Raises NotRunningError when the server has ended."""
        sources, watch = self._sources, self._sources.watch.view
        state = await sources.state.read()
        # A server that never had an endpoint has no board; one that cannot be read for a moment is as it was.
        read = await asyncio.to_thread(read_board, sources.paths)
        board = self._board = self._board if read is None else read
        serving = {endpoint_of(each.revision): each.revision for each in board.revisions if each.takes_requests}
        sources.frontends.forget_others(set(serving.values()))
        queues = await self._queues(serving)
        if not sources.bus.connected:
            state = None
        at, fleet = sources.clock(), _Fleet(tuple(watch.members()), tuple(watch.ready(ENGINE_ROLES)))
        return EndpointsObservation(
            at,
            tuple(self._seen(view, serving.get(view.spec.name), state, fleet, queues, at) for view in board.endpoints),
            None if state is None else max(state.devices_of(""), sources.promised()),
            None if state is None else state.inventory,
            board.number,
        )

    def _seen(
        self,
        view: EndpointView,
        revision: str | None,
        state: ServerState | None,
        fleet: _Fleet,
        queues: Mapping[str, QueueReading],
        at: float,
    ) -> EndpointSeen:
        name = view.spec.name
        found = observe(
            at=at,
            claims=None if state is None else state.claims_of(name),
            members=fleet.members,
            routable=fleet.routable,
            queue=queues.get(name),
            templates=dict.fromkeys(roles_of(view.spec), ""),
        )
        if state is None or revision is None:
            return EndpointSeen(view, found, None)
        frontends = self._sources.frontends
        return EndpointSeen(
            view, found, frontends.in_flight(revision), frontends.held(revision), frontends.queued(revision)
        )

    async def _queues(self, serving: dict[str, str]) -> dict[str, QueueReading]:
        """Return the lengths of the prefill queues that can be read, by endpoint."""
        names = [view.spec.name for view in self._board.endpoints if view.spec.disaggregated]
        known = [name for name in names if name in serving]
        for revision in self._queues_of.keys() - serving.values():
            del self._queues_of[revision]
        lengths = await asyncio.gather(*(self._queue(serving[name]).read() for name in known))
        return {name: length for name, length in zip(known, lengths, strict=True) if length is not None}

    def _queue(self, revision: str) -> QueueReader:
        sources = self._sources
        if revision not in self._queues_of:
            subjects = Subjects(sources.subjects.namespace, revision)
            self._queues_of[revision] = QueueReader(sources.bus, subjects)
        return self._queues_of[revision]
