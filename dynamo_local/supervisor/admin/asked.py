"""The server that is asked: its own parts, by which it answers questions about what runs, and how it asks others.

Its workers serve revisions of endpoints. Each has subjects of its own, so who asks frontends or queues asks once for
each.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from dynamo_local.bus.jetstream.prefill_queue import PrefillQueue
from dynamo_local.bus.nats import Bus
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.control.descriptions import FleetLook
from dynamo_local.control.errors import still_starting, why_absent
from dynamo_local.core.codec import Message
from dynamo_local.core.errors import BusError, NotRunningError, SupervisorError, UsageError
from dynamo_local.core.fleet.view import PREFILL_ROLE, Change
from dynamo_local.core.messages.endpoints import Board
from dynamo_local.core.messages.presence import Presence, as_sent
from dynamo_local.core.messages.reports import Event, PlannerReport
from dynamo_local.core.messages.work import QueueLength
from dynamo_local.core.names import FIRST_OF_MAIN, MAIN, endpoint_of, parse_revision, short_watcher
from dynamo_local.core.subjects import Subjects
from dynamo_local.supervisor.circus.client import CircusClient
from dynamo_local.supervisor.circus.process_registry import Registration
from dynamo_local.supervisor.places.port import Places
from state.endpoints.board import read_board
from state.paths import StatePaths
from state.statefile.model import State
from state.statefile.store import StateStore

_M = TypeVar("_M", bound=Message)

_CIRCUS_WITHIN_S = 5.0
_BUS_WITHIN_S = 1.5
"""With what else an answer takes, less than the two seconds in which it is said that the bus is away."""
NO_ANSWER = "the bus does not answer"
_REPORT_TTL_S = 10.0
"""A planner that has not reported for so long has ended."""


@dataclass
class AskedServer:
    """Parts of a running server. Until `follow` it has no bus. `record`: notes an event. `places`: where its processes
    live, once changes are allowed."""

    paths: StatePaths
    store: StateStore
    circus: CircusClient
    record: Callable[[Event], None]
    places: Places | None = field(default=None, init=False)
    role_change: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    """Roles are changed one at a time."""
    _bus: Bus | None = field(default=None, init=False)
    _watch: FleetWatch | None = field(default=None, init=False)
    _registration: Registration | None = field(default=None, init=False)
    _failed: dict[str, Presence] = field(default_factory=dict, init=False)
    """Last presences of workers that have failed, by watcher. Whoever gives work has forgotten them."""
    _report: PlannerReport | None = field(default=None, init=False)
    _reported_at: float = field(default=0.0, init=False)

    async def follow(self, bus: Bus, watch: FleetWatch, registration: Registration) -> None:
        """Answer by this connection, and by this view of all processes, which the caller starts, and which
        `registration` follows."""
        self._bus, self._watch, self._registration = bus, watch, registration
        watch.subscribe(self._on_change)
        await bus.listen(Subjects(self.paths.namespace).planner, PlannerReport, self._on_report)

    async def bus(self) -> Bus:
        """Return the connection to NATS, which has just answered. Raises SupervisorError while the server starts,
        BusError if NATS is away."""
        if self._bus is None:
            raise still_starting()
        if not await self._hears():
            raise BusError(NO_ANSWER, "NATS may be starting again: see `dynamo ps`")
        return self._bus

    async def presences(self) -> tuple[Mapping[str, Presence], str]:
        """Return the presences of all processes by watcher, or else why nothing is known of them."""
        if self._watch is None or not await self._hears():
            return {}, NO_ANSWER
        return {**self._failed, **{each.watcher: each for each in self._watch.view.members()}}, ""

    async def look(self) -> FleetLook:
        """Return what all processes announce. Raises SupervisorError while the server starts."""
        if self._bus is None or self._watch is None:
            raise still_starting()
        connected, view, now = await self._hears(), self._watch.view, time.monotonic()
        members = view.members()
        with_queue = {FIRST_OF_MAIN, *(each.revision for each in members if each.role == PREFILL_ROLE)}
        queues = {each: PrefillQueue(self._bus, Subjects(self.paths.namespace, each)) for each in sorted(with_queue)}
        lengths = [await _length(queue) if connected else None for queue in queues.values()]
        return FleetLook(
            connected,
            tuple(as_sent(each, now, now) for each in members),
            tuple(each.lease for each in view.ready({each.role for each in members})),
            {revision: length for revision, length in zip(queues, lengths, strict=True) if length is not None},
            self._report if now - self._reported_at < _REPORT_TTL_S else None,
        )

    async def state(self) -> State:
        """Read the statefile, with the processes that are heard now. Raises SupervisorError, StateError."""
        try:
            state = await asyncio.to_thread(self.store.read)
        except NotRunningError as error:
            raise why_absent(self.paths) from error
        return state if self._registration is None else self._registration.with_heard(state)

    async def board(self) -> Board | None:
        """Read the board of endpoints; None without endpoints."""
        return await asyncio.to_thread(read_board, self.paths)

    async def processes(self) -> tuple[Mapping[str, str], Mapping[str, tuple[int, ...]]]:
        """Return circus's status of each of its watchers, and the pids of their processes. Raises SupervisorError."""
        try:
            async with asyncio.timeout(_CIRCUS_WITHIN_S):
                statuses = await self.circus.statuses()
                return statuses, {name: await self.circus.pids(name) for name in statuses}
        except TimeoutError as error:
            raise SupervisorError(
                f"circus did not answer within {_CIRCUS_WITHIN_S:g} s",
                "circusd may be stopped, or starved by other programs; try again",
            ) from error

    async def _hears(self) -> bool:
        return self._watch is not None and await self._watch.hears(_BUS_WITHIN_S)

    async def _on_report(self, report: PlannerReport) -> None:
        self._report, self._reported_at = report, time.monotonic()

    def _on_change(self, change: Change) -> None:
        self._failed.pop(change.presence.watcher, None)
        if change.failed:
            self._failed[change.presence.watcher] = change.presence


async def ask(bus: Bus, watcher: str, subject: str, question: Message, reply: type[_M], *, timeout_s: float) -> _M:
    """Ask the process of a watcher, which listens on `subject`. Raises BusError that names the watcher, and DecodeError
    if the answer is something else."""
    try:
        return await bus.ask(subject, question, reply, timeout_s=timeout_s)
    except BusError as error:
        raise unanswered(watcher) from error


def unanswered(watcher: str) -> BusError:
    """The error for a process that does not answer."""
    name = short_watcher(watcher)
    return BusError(
        f"{name} does not answer", f"it may have ended or be overloaded: see `dynamo ps` and `dynamo logs {name}`"
    )


def known_revisions(used: Iterable[str], board: Board | None, endpoint: str | None = None) -> list[str]:
    """Return the revisions that exist, in order; only those of `endpoint` if it is given. Pure.

    `used`: those that processes belong to, in any order; the board may have others, whose processes are still to come.
    Raises UsageError, which lists the endpoints, if there is no such endpoint.
    """
    listed = () if board is None else (each.revision for each in board.revisions)
    found = sorted({*used, *listed} - {""}, key=parse_revision)
    if endpoint is None:
        return found
    names = endpoint_names(found, board)
    if endpoint not in names:
        raise UsageError(f"there is no endpoint {endpoint!r}", f"there are: {', '.join(names) or 'none'}")
    return [revision for revision in found if endpoint_of(revision) == endpoint]


def endpoint_names(revisions: Iterable[str], board: Board | None) -> list[str]:
    """Return the names of the endpoints that are on the board or have revisions, sorted. Pure."""
    ordered = () if board is None else (view.spec.name for view in board.endpoints)
    return sorted({*map(endpoint_of, revisions), *ordered} - {""})


def shown_model(revision: str) -> str:
    """What a revision serves, in words."""
    return "the server's own model" if endpoint_of(revision) == MAIN else revision


async def _length(queue: PrefillQueue) -> QueueLength | None:
    """None: there is no such queue, or it cannot be read."""
    try:
        return await queue.length()
    except BusError:
        return None
