"""Which of a frontend's requests move when: away from workers that go, and where an operator wants them.

Workers that drain, whose lease is revoked, or that have become prefill workers, are left: requests with tokens move
with their KV, those without are placed again. What cannot be moved finishes where it is, under the worker's own
deadline; so does everything while there is no other worker.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from components.frontend.migration.executor import MigrationExecutor
from components.frontend.migration.state import MigrationState
from components.frontend.requests import LiveRequest, LiveRequests
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core.fleet.freeness import freest
from dynamo_local.core.fleet.view import PREFILL_ROLE, TTL_S, Change
from dynamo_local.core.histogram import Histogram
from dynamo_local.core.messages.admin import MigrationResult
from dynamo_local.core.messages.presence import Ended, MigrationCounts, Presence
from dynamo_local.core.messages.work import Cancel
from dynamo_local.core.migration.in_flight import InFlightMigration, InFlightMigrations
from dynamo_local.core.migration.protocol import MigrationOutcome, again_after_s
from dynamo_local.core.request.fidelity import Fidelity
from dynamo_local.tasks import TaskGuard

_log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.25
_DRAINING = "the frontend is draining"
_TRIAL = "trial"

_GAPS_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_GAPS_STEPS = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 10.0, 20.0, 50.0)


@dataclass(frozen=True)
class AtOnce:
    """How many moves of a frontend may be under way: each takes a little from both of its workers."""

    of_a_source: int = 4
    in_all: int = 8


@dataclass
class _Wanted:
    """A move that somebody waits for. `destination`: a lease, or None: whoever is freest."""

    destination: str | None
    cold: bool
    result: asyncio.Future[MigrationResult]


class MigrationScheduler:
    """Of one frontend. `live` are the dispatcher's requests; `tell` has it say something to a worker, `place` has it
    place a request."""

    def __init__(
        self,
        live: LiveRequests,
        fleet: FleetWatch,
        carrier: MigrationExecutor,
        tasks: TaskGuard,
        tell: Callable[[str, Cancel], Coroutine[Any, Any, None]],
        place: Callable[[LiveRequest], Coroutine[Any, Any, None]],
        at_once: AtOnce | None = None,
    ) -> None:
        self.live = live
        self._fleet = fleet
        self._carrier = carrier
        self._tasks = tasks
        self._tell = tell
        self._place = place
        self._at_once = at_once or AtOnce()
        self._wanted: dict[str, _Wanted] = {}
        self.traffic = InFlightMigrations()
        self._unheard: dict[str, float] = {}
        """Workers that have not answered, and when that was."""
        self.stopped = False
        self.outcomes: Counter[tuple[str, str]] = Counter()
        """(outcome, reason) of all moves so far."""
        self.gap_s = Histogram(_GAPS_S)
        self.gap_steps = Histogram(_GAPS_STEPS)
        self._last: MigrationResult | None = None
        """The last one that was brought to its end."""
        self._listeners: list[Callable[[MigrationCounts], None]] = []

    @property
    def pulled_tokens(self) -> int:
        """Tokens whose KV was pulled for moves."""
        return self._carrier.pulled_tokens

    @property
    def counts(self) -> MigrationCounts:
        """All that is counted, as it is told to others."""
        return MigrationCounts(
            tuple(Ended(reason, outcome, number) for (outcome, reason), number in sorted(self.outcomes.items())),
            self._carrier.pulled_bytes,
            None if self._last is None else self._last.gap_s,
            None if self._last is None else self._last.gap_steps,
        )

    def subscribe(self, listener: Callable[[MigrationCounts], None]) -> None:
        """Have `listener` called whenever a move has ended."""
        self._listeners.append(listener)

    def start(self) -> None:
        """Move what is to be moved from now on."""
        self._fleet.subscribe(self._on_change)
        self._tasks.spawn("moves", self._run())

    def stop(self) -> None:
        """Begin no more moves: the frontend drains, and perhaps the whole server."""
        self.stopped = True
        for request_id in list(self._wanted):
            self._refuse(request_id, _DRAINING)

    def order(
        self, live: LiveRequest, destination: str | None, *, cold: bool = False
    ) -> asyncio.Future[MigrationResult]:
        """Have a request moved, when its turn comes. `cold`: without its KV."""
        if live.request_id in self._wanted:
            self._refuse(live.request_id, "it is to go elsewhere now")
        wanted = _Wanted(destination, cold, asyncio.get_running_loop().create_future())
        self._wanted[live.request_id] = wanted
        if self.stopped:
            self._refuse(live.request_id, _DRAINING)
        self._look(time.monotonic())
        return wanted.result

    def why_not(self, live: LiveRequest) -> str | None:
        """Why the request cannot be moved with its KV, or None."""
        if live.log.worker is None or live.job is not None or live.held is not None:
            return "it is being placed, or its prompt prefilled elsewhere"
        if live.log.position == 0:
            return "it has no token yet"
        if live.request.survival.fidelity is Fidelity.NONE:
            because_of = live.request.survival.because_of
            return f"the state of {because_of} would be lost" if because_of else "its state would be lost"
        if live.moving is not None:
            return "it is being moved"
        if live.standing.suspect:
            return "engines died of it or beside it: it is to be tried alone"
        return None

    def has_turn(self, live: LiveRequest) -> bool:
        """Whether one more move may be under way from its worker."""
        assert live.log.worker is not None, "what has no worker is not moved"
        of_it, in_all = self.traffic.leaving(live.log.worker), self.traffic.under_way
        return of_it < self._at_once.of_a_source and in_all < self._at_once.in_all

    def begin(
        self,
        live: LiveRequest,
        destination: Presence,
        reason: str,
        *,
        cold: bool = False,
        floor: float | None = None,
    ) -> asyncio.Task[MigrationResult]:
        """Move a request of which `why_not` says nothing, now. `floor`: only if the destination stays so free."""
        source = live.log.worker
        assert source is not None, "what has no worker is not moved"
        assert destination.engine is not None, "nothing is moved to a worker that does not tell of its engine"
        live.moving = MigrationState(destination.lease, reason, cold, floor)
        # Counted here: the task begins later.
        trip = self.traffic.begin(source, destination.lease, live.tokens, time.monotonic())
        moving = self._move(live, live.moving, trip)
        return self._tasks.spawn(f"move {live.request_id}", moving)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            # An order for a request that is over meanwhile is still to be answered.
            if not self._wanted:
                await self.live.some()
            self._look(time.monotonic())

    def _on_change(self, change: Change) -> None:
        if not self.live:
            return
        for live in self.live.values():
            if live.moving is not None and live.moving.destination == change.presence.lease:
                live.stir()
        self._look(time.monotonic())

    def _look(self, now: float) -> None:
        """Begin the moves whose time has come."""
        if self.stopped:
            return
        for request_id, wanted in list(self._wanted.items()):
            self._begin_wanted(request_id, wanted)
        leaving = self._leaving()
        for live in self.live.values() if leaving else ():
            if live.log.worker in leaving and live.moving is None and now >= live.not_before:
                self._leave(live, leaving[live.log.worker])

    def _leaving(self) -> dict[str, str]:
        """The leases of workers that are to be left, and why."""
        view = self._fleet.view
        turned = {presence.lease: "role" for presence in view.routable((PREFILL_ROLE,))}
        set_apart = {presence.lease: _TRIAL for presence in view.exclusive()}
        return turned | set_apart | {presence.lease: "drain" for presence in view.leaving()}

    def _leave(self, live: LiveRequest, reason: str) -> None:
        """Have a request leave its worker, if there is another one and its turn has come."""
        if live.standing.suspect:
            # Where it is, nobody else is.
            return
        anew = live.log.position == 0 and live.job is None and live.held is None
        if reason == _TRIAL and self._may_wait(live):
            self._put_elsewhere(live)
            return
        if not anew and (self.why_not(live) is not None or not self.has_turn(live)):
            return
        destination = self._destination(live, None)
        if destination is not None and anew:
            self._put_elsewhere(live)
        elif destination is not None:
            self.begin(live, destination, reason)

    def _may_wait(self, live: LiveRequest) -> bool:
        """Whether a request is taken off its worker and waits for any: it cannot be moved with its KV (it has none,
        there is nowhere to go, or that has failed), and it loses nothing but time."""
        stuck = live.log.position == 0 or live.stayed > 0 or self._destination(live, None) is None
        survives = live.log.position == 0 or live.request.survival.fidelity is not Fidelity.NONE
        return stuck and survives and live.job is None

    def _begin_wanted(self, request_id: str, wanted: _Wanted) -> None:
        live = self.live.get(request_id)
        if live is None:
            self._refuse(request_id, "the request is over")
        elif (why := self.why_not(live)) is not None:
            self._refuse(request_id, why)
        elif wanted.destination == live.log.worker:
            self._refuse(request_id, "it is there already")
        elif (destination := self._destination(live, wanted.destination)) is None:
            self._refuse(request_id, "there is no worker that it could go to")
        elif self.has_turn(live):
            del self._wanted[request_id]
            moving = self.begin(live, destination, "hand", cold=wanted.cold)
            moving.add_done_callback(lambda task: _pass_on(task, wanted.result))

    def _refuse(self, request_id: str, why: str) -> None:
        wanted = self._wanted.pop(request_id)
        if not wanted.result.done():
            wanted.result.set_result(_stayed(request_id, why))

    def _destination(self, live: LiveRequest, wanted: str | None) -> Presence | None:
        now = time.monotonic()
        # Who does not answer may be dead, and is missed soon. Until then it looks freer than all others.
        self._unheard = {worker: since for worker, since in self._unheard.items() if now - since <= TTL_S}
        others = [worker for worker in self._fleet.view.routable() if worker.lease != live.log.worker]
        if wanted is None:
            candidates = [worker for worker in others if worker.lease not in self._unheard]
        else:
            candidates = [worker for worker in others if worker.lease == wanted]
        changes = {worker.lease: self.traffic.change(worker) for worker in candidates}
        return freest(candidates, changes, now, live.turned_down)

    async def _move(self, live: LiveRequest, moving: MigrationState, trip: InFlightMigration) -> MigrationResult:
        try:
            result = await self._carrier.carry_out(live, moving)
        except Exception:  # noqa: BLE001
            # The boundary of a move: the request itself is looked after by recovery, whatever its epoch is now.
            _log.exception("the move of %s has failed", live.request_id)
            result = MigrationResult(live.request_id, MigrationOutcome.STAYED.value, "the move has failed")
        now = time.monotonic()
        live.moving = None
        if moving.unanswered:
            self._unheard[moving.destination] = now
        stayed = result.outcome == MigrationOutcome.STAYED
        live.stayed = live.stayed + 1 if stayed else 0
        live.not_before = now + again_after_s(live.stayed)
        live.turned_down = moving.destination if stayed else None
        live.moved_at = moving.cut_at or live.moved_at
        self.traffic.end(trip, now, moved=moving.cut_at is not None)
        self._note(result, moving.reason)
        self._look(now)
        return result

    def _note(self, result: MigrationResult, reason: str) -> None:
        self.outcomes[result.outcome, reason] += 1
        if result.gap_s is not None:
            self._last = result
            self.gap_s.observe(result.gap_s)
        if result.gap_steps is not None:
            self.gap_steps.observe(result.gap_steps)
        if result.outcome != MigrationOutcome.MOVED:
            _log.info("request %s was not moved: %s (%s)", result.request_id, result.why, result.outcome)
        for listener in self._listeners:
            listener(self.counts)

    def _put_elsewhere(self, live: LiveRequest) -> None:
        """Nothing would be gained by moving it: it begins anew."""
        old = live.log.current
        worker = live.log.give_up(old.epoch)
        assert worker is not None, "only those with a worker leave it"
        self._tasks.spawn(f"take {old} back", self._tell(worker, Cancel((old,))))
        self._tasks.spawn(f"place {live.request_id}", self._place(live))


def _stayed(request_id: str, why: str) -> MigrationResult:
    return MigrationResult(request_id, MigrationOutcome.STAYED.value, why)


def _pass_on(task: asyncio.Task[MigrationResult], result: asyncio.Future[MigrationResult]) -> None:
    if not result.done():
        if task.cancelled():
            result.cancel()
        elif task.exception() is None:
            result.set_result(task.result())
