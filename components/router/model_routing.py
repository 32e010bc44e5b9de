"""Routing for one model: its workers, their load, and the choice among them."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from msgspec.structs import replace

from components.router.cache_watch import CacheWatch
from dynamo_local.bus.nats import Bus
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core.fleet.view import Change, Happened
from dynamo_local.core.messages.presence import Counts
from dynamo_local.core.messages.routing import (
    Account,
    Assignment,
    AssignRequest,
    Charged,
    Charges,
    Prefilled,
    Released,
    RouteRow,
    RoutesQuestion,
    WeighedWorker,
)
from dynamo_local.core.routing.explanation import route_row
from dynamo_local.core.routing.ledger import Ledger
from dynamo_local.core.routing.policies import RoutingPolicy
from dynamo_local.core.subjects import Subjects

UNDER_WAY_S = 3.0
"""A frontend's charges may not contain assignments younger than this: they had not reached it when it sent them."""

_HEARD_WITHIN_S = 0.5
"""Time for workers to answer when they are asked for their presences. A frontend waits longer for its answer."""


@dataclass
class ModelRouting:
    """Routing among the workers of an endpoint's revision."""

    bus: Bus
    subjects: Subjects
    policy: RoutingPolicy
    on_news: Callable[[], None]
    """Called when what workers have cached has changed, or who is in step."""
    ledger: Ledger = field(init=False)
    _fleet: FleetWatch = field(init=False)
    _caches: CacheWatch = field(init=False)
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _empty_since: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._fleet = FleetWatch(self.bus, self.subjects)
        self._caches = CacheWatch(self.bus, self.subjects, self._fleet.view, self.on_news)
        self.ledger = Ledger(self._caches.index)
        self._fleet.subscribe(self._on_change)

    async def start(self) -> None:
        """Listen to the presences of the model's processes, and to what its workers have cached. Raises BusError."""
        if self.policy.needs_blocks:
            await self._caches.start()
        await self._fleet.start()

    def works(self) -> Iterator[tuple[str, Coroutine[Any, Any, None]]]:
        """What is to run until it is cancelled, with names."""
        yield "fleet", self._fleet.run()
        if self.policy.needs_blocks:
            yield "caches", self._caches.run()

    async def stop(self) -> None:
        """Listen no more."""
        await self._fleet.stop()
        await self._caches.stop()

    async def heard(self) -> None:
        """Wait until there is a worker to assign to, or until workers would have been heard."""
        give_up_at = time.monotonic() + _HEARD_WITHIN_S
        while not self._fleet.view.routable() and (left_s := give_up_at - time.monotonic()) > 0:
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._changed.wait()

    def assign(self, request: AssignRequest) -> Routed:
        """Choose a worker and charge it with the request. Raises DecodeError if the request's blocks are no keys."""
        self._caches.look()
        now, needs_blocks = time.monotonic(), self.policy.needs_blocks
        # A frontend sends blocks until it is told that they are not needed.
        blocks = request.blocks if needs_blocks else b""
        choice = self.policy.choose(request, self._fleet.view.routable(), self.ledger, now)
        if choice is None:
            return Routed(Assignment(None, needs_blocks=needs_blocks))
        worker, cached = choice.worker, choice.cached
        uncached = None if cached is None else max(request.tokens - cached, 0)
        order = self.ledger.charge(
            request.frontend, request.request_id, worker, request.tokens, now, uncached=uncached, blocks=blocks
        )
        self._caches.assigned(worker, blocks)
        assignment = Assignment(worker, cached if blocks else None, choice.pull_from, needs_blocks, order=order)
        return Routed(assignment, choice.costs)

    @property
    def index_blocks(self) -> int:
        """Number of different blocks that are known to be cached."""
        return len(self._caches.index)

    @property
    def out_of_step(self) -> int:
        """Number of workers of which some message about their caches is missing."""
        return self._caches.out_of_step

    def note(self, told: Account) -> None:
        """Enter what a frontend tells. Raises DecodeError if a request's blocks are no keys."""
        match told:
            case Charged():
                self._take_over(told)
            case Charges():
                self._settle(told)
            case Released():
                self.ledger.release(told.frontend, told.request_id)
            case Prefilled():
                self.ledger.prefilled(told.frontend, told.request_id)

    def _take_over(self, charged: Charged) -> None:
        """Enter what another router has assigned."""
        worker, blocks = charged.charge.worker, charged.blocks if self.policy.needs_blocks else b""
        # Charges of workers that are gone would never be released.
        if self._fleet.view.get(worker) is not None:
            self.ledger.take_over(charged.frontend, charged.charge, time.monotonic(), blocks)
            self._caches.assigned(worker, blocks)

    def _settle(self, message: Charges) -> None:
        """Take a frontend's own account for its charges."""
        # Charges of workers that are gone would never be released.
        charges = [charge for charge in message.charges if self._fleet.view.get(charge.worker) is not None]
        now = time.monotonic()
        self.ledger.settle(message.frontend, charges, now - UNDER_WAY_S, now)

    def empty_for_s(self) -> float:
        """For how long it has had no process, by the calls of this method."""
        now = time.monotonic()
        if self._fleet.view.members():
            self._empty_since = None
            return 0.0
        self._empty_since = self._empty_since or now
        return now - self._empty_since

    def _on_change(self, change: Change) -> None:
        self._changed.set()
        self._caches.follow(change)
        if change.what in (Happened.LEFT, Happened.REVOKED):
            self.ledger.forget_worker(change.presence.lease)
            self.ledger.forget_frontend(change.presence.lease)


# The router's account of its assignments: counts, and the latest ones with what they were chosen by.

_KEPT = 128
"""Number of assignments that are kept to be explained."""

_MOST_TOLD = 100
"""Bound on the assignments of an answer, which is one message."""


@dataclass(frozen=True)
class Routed:
    """An answer to a frontend, and the figures of all candidates."""

    assignment: Assignment
    costs: tuple[WeighedWorker, ...] = ()


@dataclass(frozen=True)
class _Kept:
    request: AssignRequest
    routed: Routed
    revision: str
    at: float


class Assignments:
    """The assignments of all models."""

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self._assigned = self._unassigned = self._tokens = self._predicted = self._pulls = 0
        self._latest: deque[_Kept] = deque(maxlen=_KEPT)
        """The latest first."""

    def add(self, request: AssignRequest, routed: Routed, revision: str) -> None:
        """Enter an answer to a frontend."""
        self._latest.appendleft(_Kept(replace(request, blocks=b""), routed, revision, time.monotonic()))
        if routed.assignment.worker is None:
            self._unassigned += 1
            return
        self._assigned += 1
        self._tokens += request.tokens
        self._predicted += routed.assignment.cached or 0
        self._pulls += _to_pull(routed)

    def counts(self, *, index_blocks: int, out_of_step: int) -> Counts:
        """What the router's presence tells."""
        return Counts(
            assigned=self._assigned,
            unassigned=self._unassigned,
            routed_tokens=self._tokens,
            predicted_tokens=self._predicted,
            pull_tokens=self._pulls,
            policy=self._policy,
            index_blocks=index_blocks,
            out_of_step=out_of_step,
        )

    def latest(self, question: RoutesQuestion) -> tuple[RouteRow, ...]:
        """The latest assignments, the latest first."""
        wanted = question.revisions
        kept = (each for each in self._latest if wanted is None or each.revision in wanted)
        now = time.monotonic()
        return tuple(_row(each, now) for each in islice(kept, min(question.limit, _MOST_TOLD)))


def _to_pull(routed: Routed) -> int:
    """Tokens that the chosen worker lacks, and another one, from which it is to pull them, has."""
    worker, source = routed.assignment.worker, routed.assignment.pull_from
    if source is None or worker is None:
        return 0
    had = {each.worker: each.cached for each in routed.costs}
    return had[source] - had[worker]


def _row(kept: _Kept, now: float) -> RouteRow:
    routed = kept.routed
    return route_row(kept.request, routed.assignment, routed.costs, revision=kept.revision, age_s=now - kept.at)
