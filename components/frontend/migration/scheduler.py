"""Decides which of a frontend's requests migrate when: off workers that are to be left, and by operators' orders.

Workers that drain, whose lease is revoked, or that have become prefill workers, are left: requests with tokens migrate
with their KV, requests without are placed again. A request that cannot migrate finishes where it is, under the worker's
own deadline; so do all while there is no other worker.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType

from components.frontend.migration.state import MigrationState, MigrationStatistics
from components.frontend.requests.live_requests import LiveRequest, LiveRequests
from components.frontend.requests.request_table import RequestTable
from components.frontend.worker_link import WorkerLink
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core.errors import BusError, DecodeError
from dynamo_local.core.fleet.freeness import freest
from dynamo_local.core.fleet.view import PREFILL_ROLE, TTL_S, Change
from dynamo_local.core.messages.admin import MigrationResult
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.messages.reports import Event
from dynamo_local.core.messages.work import MigrationAnswer, Reserve, Warm
from dynamo_local.core.migration import protocol
from dynamo_local.core.migration.protocol import (
    Finished,
    InFlightMigration,
    InFlightMigrations,
    LogSeen,
    Migration,
    MigrationLimits,
    MigrationOutcome,
)
from dynamo_local.core.request.recovery import Fidelity
from dynamo_local.tasks import TaskGuard

_log = logging.getLogger(__name__)

_CHECK_EVERY_S = 0.25
"""Between two looks for requests that are to leave their workers."""
_DRAINING = "the frontend is draining"
_TRIAL = "trial"


@dataclass(frozen=True)
class AtOnce:
    """Limits on the migrations of a frontend in progress: each slows down both of its workers a little."""

    of_a_source: int = 4
    in_all: int = 8


@dataclass
class _Order:
    """A migration that somebody waits for. `destination`: a lease, or None for the freest worker."""

    destination: str | None
    cold: bool
    result: asyncio.Future[MigrationResult]


class MigrationScheduler:
    """Begins the migrations of one frontend's requests, and counts how they end."""

    def __init__(
        self,
        table: RequestTable,
        executor: MigrationExecutor,
        link: WorkerLink,
        fleet: FleetWatch,
        tasks: TaskGuard,
    ) -> None:
        self._table = table
        self.executor = executor
        self._link = link
        self._fleet = fleet
        self._tasks = tasks
        self.at_once = AtOnce()
        self._orders: dict[str, _Order] = {}
        """Orders that have not begun, by request id."""
        self.in_flight = InFlightMigrations()
        self._unanswered_at: dict[str, float] = {}
        """When workers were last asked without answering (CLOCK_MONOTONIC), by lease."""
        self.stopped = False
        self.record: Callable[[Event], None] = lambda _: None
        """Called with the event of each migration that has ended."""

    @property
    def requests(self) -> LiveRequests:
        """The frontend's live requests."""
        return self._table.requests

    @property
    def statistics(self) -> MigrationStatistics:
        """The counts of the frontend's migrations."""
        return self.executor.statistics

    def start(self) -> None:
        """Begin migrations from now on, by the fleet's changes and by orders."""
        self._fleet.subscribe(self._on_change)
        self._tasks.spawn("migrations", self._run())

    def stop(self) -> None:
        """Begin no more migrations: the frontend drains, and perhaps the whole server."""
        self.stopped = True
        for request_id in list(self._orders):
            self._refuse(request_id, _DRAINING)

    def order(
        self, live: LiveRequest, destination: str | None, *, cold: bool = False
    ) -> asyncio.Future[MigrationResult]:
        """Have a request migrate as soon as one more migration may begin. A later order replaces an earlier one.

        `cold`: its KV is left behind.
        """
        if live.request_id in self._orders:
            self._refuse(live.request_id, "it is to go elsewhere now")
        order = _Order(destination, cold, asyncio.get_running_loop().create_future())
        self._orders[live.request_id] = order
        if self.stopped:
            self._refuse(live.request_id, _DRAINING)
        self._begin_due(time.monotonic())
        return order.result

    def why_not(self, live: LiveRequest) -> str | None:
        """Return why the request cannot migrate with its KV, or None if it can."""
        if live.log.worker is None or live.prefill.job is not None or live.prefill.held is not None:
            return "it is being placed, or its prompt prefilled elsewhere"
        if live.log.position == 0:
            return "it has no token yet"
        if live.request.survival.fidelity is Fidelity.NONE:
            because_of = live.request.survival.because_of
            return f"the state of {because_of} would be lost" if because_of else "its state would be lost"
        if live.migration.current is not None:
            return "it is being migrated"
        if live.recovery.standing.suspect:
            return "engines died of it or beside it: it is to be tried alone"
        return None

    def may_begin(self, live: LiveRequest) -> bool:
        """Return whether one more migration may be in progress from the request's worker."""
        assert live.log.worker is not None, "only a request that a worker has is migrated"
        leaving, in_all = self.in_flight.leaving(live.log.worker), self.in_flight.in_progress
        return leaving < self.at_once.of_a_source and in_all < self.at_once.in_all

    def begin(
        self,
        live: LiveRequest,
        destination: Presence,
        reason: str,
        *,
        cold: bool = False,
        floor: float | None = None,
    ) -> asyncio.Task[MigrationResult]:
        """Begin to migrate a request now. `why_not` must return None for it, and `may_begin` true.

        `floor`: the destination refuses if it would become less free than that, in steps.
        """
        source = live.log.worker
        assert source is not None, "only a request that a worker has is migrated"
        assert destination.engine is not None, "a destination must have reported its engine"
        state = MigrationState(destination.lease, reason, cold, floor)
        live.migration.begin(state)
        # Counted here, because the task begins later.
        entry = self.in_flight.begin(source, destination.lease, live.tokens, time.monotonic())
        leaving = self._fleet.view.get(source)
        watchers = (source if leaving is None else leaving.watcher, destination.watcher)
        return self._tasks.spawn(f"migrate {live.request_id}", self._migrate(live, state, entry, watchers))

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_EVERY_S)
            # An order for a request that has ended meanwhile is still to be answered.
            if not self._orders:
                await self.requests.some()
            self._begin_due(time.monotonic())

    def _on_change(self, change: Change) -> None:
        if not self.requests:
            return
        for live in self.requests.values():
            current = live.migration.current
            if current is not None and current.destination == change.presence.lease:
                live.migration.wake()
        self._begin_due(time.monotonic())

    def _begin_due(self, now: float) -> None:
        """Carry out the orders, and have requests leave workers, as far as that is possible now."""
        if self.stopped:
            return
        for request_id, order in list(self._orders.items()):
            self._begin_order(request_id, order)
        leaving = self._leaving()
        for live in self.requests.values() if leaving else ():
            migration = live.migration
            if live.log.worker in leaving and migration.current is None and now >= migration.not_before:
                self._leave(live, leaving[live.log.worker])

    def _leaving(self) -> dict[str, str]:
        """Return the leases of workers that are to be left, with the reasons."""
        view = self._fleet.view
        turned = {presence.lease: "role" for presence in view.routable((PREFILL_ROLE,))}
        set_apart = {presence.lease: _TRIAL for presence in view.exclusive()}
        return turned | set_apart | {presence.lease: "drain" for presence in view.leaving()}

    def _leave(self, live: LiveRequest, reason: str) -> None:
        """Have a request leave its worker, if another worker can take it now."""
        if live.recovery.standing.suspect:
            # Its worker is set apart for this very request.
            return
        has_no_token = live.log.position == 0 and live.prefill.job is None and live.prefill.held is None
        if reason == _TRIAL and self._may_wait(live):
            self._place_again(live)
            return
        if not has_no_token and (self.why_not(live) is not None or not self.may_begin(live)):
            return
        destination = self._destination(live, None)
        if destination is not None and has_no_token:
            self._place_again(live)
        elif destination is not None:
            self.begin(live, destination, reason)

    def _may_wait(self, live: LiveRequest) -> bool:
        """Return whether a request may be taken off its worker without another worker at hand. It cannot migrate with
        its KV (it has none, there is no destination, or the last migration failed), and loses nothing but time."""
        has_no_token = live.log.position == 0
        stuck = has_no_token or live.migration.stayed > 0 or self._destination(live, None) is None
        survives = has_no_token or live.request.survival.fidelity is not Fidelity.NONE
        return stuck and survives and live.prefill.job is None

    def _begin_order(self, request_id: str, order: _Order) -> None:
        live = self.requests.get(request_id)
        if live is None:
            self._refuse(request_id, "the request is over")
        elif (why := self.why_not(live)) is not None:
            self._refuse(request_id, why)
        elif order.destination == live.log.worker:
            self._refuse(request_id, "it is there already")
        elif (destination := self._destination(live, order.destination)) is None:
            self._refuse(request_id, "there is no worker that it could go to")
        elif self.may_begin(live):
            del self._orders[request_id]
            migrating = self.begin(live, destination, "hand", cold=order.cold)
            migrating.add_done_callback(lambda task: _pass_on(task, order.result))

    def _refuse(self, request_id: str, why: str) -> None:
        order = self._orders.pop(request_id)
        if not order.result.done():
            order.result.set_result(_stayed(request_id, why))

    def _destination(self, live: LiveRequest, wanted: str | None) -> Presence | None:
        """Return the worker that a request may migrate to now: the one wanted, or the freest."""
        now = time.monotonic()
        # A worker that does not answer may be dead, and looks freer than all others until it is missed.
        self._unanswered_at = {worker: at for worker, at in self._unanswered_at.items() if now - at <= TTL_S}
        others = [worker for worker in self._fleet.view.routable() if worker.lease != live.log.worker]
        if wanted is None:
            candidates = [worker for worker in others if worker.lease not in self._unanswered_at]
        else:
            candidates = [worker for worker in others if worker.lease == wanted]
        changes = {worker.lease: self.in_flight.change(worker) for worker in candidates}
        return freest(candidates, changes, now, live.migration.refused_by)

    async def _migrate(
        self, live: LiveRequest, state: MigrationState, entry: InFlightMigration, watchers: tuple[str, str]
    ) -> MigrationResult:
        try:
            result = await self.executor.carry_out(live, state)
        except Exception:  # noqa: BLE001
            # The boundary of a migration: recovery looks after the request, whatever its epoch is now.
            _log.exception("the migration of request %s has failed", live.request_id)
            result = _stayed(live.request_id, "the migration has failed")
        now = time.monotonic()
        if state.unanswered:
            self._unanswered_at[state.destination] = now
        live.migration.end(state, now, stayed=result.outcome == MigrationOutcome.STAYED)
        self.in_flight.end(entry, now, moved=state.cut_at is not None)
        if result.outcome != MigrationOutcome.MIGRATED:
            _log.info("request %s was not migrated: %s (%s)", result.request, result.why, result.outcome)
        self.statistics.ended(result, state.reason)
        self.record(migration_event(result, state.reason, *watchers))
        self._begin_due(now)
        return result

    def _place_again(self, live: LiveRequest) -> None:
        """Take the request off its worker and place it under a new epoch, without its KV."""
        old = live.log.current
        worker = live.log.give_up(old.epoch)
        assert worker is not None, "only a request that a worker has leaves it"
        self._tasks.spawn(f"take {old} back", self._link.cancel(worker, old))
        self._tasks.spawn(f"place {live.request_id}", self._table.place(live))


def _stayed(request_id: str, why: str) -> MigrationResult:
    return MigrationResult(request_id, MigrationOutcome.STAYED.value, why)


def _pass_on(task: asyncio.Task[MigrationResult], result: asyncio.Future[MigrationResult]) -> None:
    if not result.done():
        if task.cancelled():
            result.cancel()
        elif task.exception() is None:
            result.set_result(task.result())


# The event (core/messages/reports.py) of a migration that has ended.

WHY: Mapping[str, str] = MappingProxyType(
    {
        "drain": "its worker drains",
        "role": "its worker prefills now",
        "hand": "`dynamo migrate`",
        "rebalance": "to balance the load",
        "room": "to make room for a request that waits",
        "thrash": "its worker gives up KV again and again, and computes it anew",
        "trial": "its worker is set apart for a suspect request",
    }
)
"""Reasons of migrations (core/migration/protocol.py) in words."""


def migration_event(result: MigrationResult, reason: str, source: str, destination: str) -> Event:
    """Return the event. `source` and `destination` are watchers. Pure."""
    why = WHY.get(reason, reason)
    if result.outcome == MigrationOutcome.MIGRATED:
        what = f"migrated to {destination}{_gap(result)}"
    else:
        what, why = f"not migrated to {destination}", f"{why}; {result.outcome}: {result.why}"
    return Event(
        "migration",
        what,
        why,
        source,
        request=result.request,
        outcome=result.outcome,
        source=source,
        destination=destination,
        gap_s=result.gap_s,
    )


def _gap(result: MigrationResult) -> str:
    if result.gap_s is None:
        return ""
    steps = "" if result.gap_steps is None else f" ({result.gap_steps:.1f} steps)"
    return f", gap {result.gap_s * 1e3:.0f} ms{steps}"


# Carries out single migrations: asks the destination, makes the cut, and waits for the first token there.
#
# What to do when is decided in core/migration/protocol.py.


class MigrationExecutor:
    """Carries out the migrations of one frontend's requests."""

    def __init__(self, table: RequestTable, link: WorkerLink, limits: MigrationLimits | None = None) -> None:
        self._table = table
        self._link = link
        self.limits = limits or MigrationLimits()
        self.statistics = MigrationStatistics()

    async def carry_out(self, live: LiveRequest, state: MigrationState) -> MigrationResult:
        """Migrate the request, unless something comes between. Raises no error of the bus or of a worker."""
        # Without a round of `Warm`, nothing is pulled before the cut.
        limits = replace(self.limits, rounds=0) if state.cold else self.limits
        migration = Migration(self._seen(live, state), state.destination, limits)
        step_s = live.pace.step_s
        refused: str | None = None
        while not isinstance(
            action := migration.advance(self._seen(live, state), now := time.monotonic(), refused), Finished
        ):
            refused = None
            match action:
                case protocol.Reserve():
                    keep_s = action.until - now
                    question = Reserve(live.request_id, self._link.frontend, action.tokens, keep_s, state.floor)
                    refused = await self._ask(live, state, migration, question, self.limits.reserve_s)
                case protocol.Warm():
                    refused = await self._ask(live, state, migration, self._warm(live, action, now), self.limits.warm_s)
                case protocol.Await():
                    await _changed(state, action.until)
                case protocol.Cut():
                    step_s = live.pace.step_s
                    await self._cut(live, state)
        if action.gives_back:
            await self._link.cancel_reservation(state.destination, live.request_id)
        return _result(live, state, action, step_s)

    def _seen(self, live: LiveRequest, state: MigrationState) -> LogSeen:
        log, is_live = live.log, self._table.requests.is_live(live) and not live.log.finished
        is_there = self._table.placer.is_routable(state.destination)
        return LogSeen(log.epoch, log.worker, live.tokens, is_live, is_there)

    def _warm(self, live: LiveRequest, action: protocol.Warm, now: float) -> Warm:
        assert live.log.worker is not None, "only a request that a worker has is migrated"
        context = [*live.request.prompt_token_ids, *live.log.tokens][: action.tokens]
        request = live.request
        return Warm(
            live.request_id,
            live.log.worker,
            context,
            action.until - now,
            cache_salt=request.cache_salt,
            adapter=request.adapter,
            priority=request.priority,
            key=request.key,
        )

    async def _ask(
        self, live: LiveRequest, state: MigrationState, migration: Migration, question: Reserve | Warm, timeout_s: float
    ) -> str | None:
        """Return why the destination refuses, or None. Does not wait for the answer once the migration has ended."""
        asking = asyncio.ensure_future(self._link.ask_migration_target(state.destination, question, timeout_s))
        try:
            while not asking.done():
                if not migration.is_on(self._seen(live, state)):
                    return "it was not waited for"
                await _either(asking, state.changed)
            answer = asking.result()
        except (BusError, DecodeError) as error:
            state.unanswered = True
            return str(error)
        finally:
            asking.cancel()
        self.statistics.pulled(answer.pulled_tokens, answer.pulled_bytes)
        return answer.refused

    async def _cut(self, live: LiveRequest, state: MigrationState) -> None:
        # No token may come between the decision and the new epoch: nothing is awaited before it is minted.
        old, source = live.log.current, live.log.worker
        assert source is not None, "only a request that a worker has is cut over"
        state.cut_at, state.left_at = time.monotonic(), live.pace.last
        state.changed.clear()
        current = live.log.assign(state.destination)
        try:
            await self._table.placer.send(live, current, state.destination)
        except BusError as error:
            _log.warning("request %s could not be given to the worker that it migrates to: %s", live.request_id, error)
            await self._table.lose(live, current.epoch)
        await self._link.cancel(source, old)
        if self._table.requests.is_live(live) and live.log.current == current:
            # Otherwise the request has ended, or been placed again, and was charged accordingly.
            await self._table.placer.reassign(live, state.destination)


async def _either(asking: asyncio.Future[MigrationAnswer], changed: asyncio.Event) -> None:
    """Wait for the answer, or for the next change."""
    changed.clear()
    changing = asyncio.ensure_future(changed.wait())
    try:
        await asyncio.wait((asking, changing), return_when=asyncio.FIRST_COMPLETED)
    finally:
        changing.cancel()


async def _changed(state: MigrationState, until: float) -> None:
    """Wait until the request's log may have changed, or until that time (CLOCK_MONOTONIC, s)."""
    with suppress(TimeoutError):
        async with asyncio.timeout(max(until - time.monotonic(), 0.0)):
            await state.changed.wait()
    state.changed.clear()


def _result(live: LiveRequest, state: MigrationState, finished: Finished, step_s: float | None) -> MigrationResult:
    gap_s = state.gap_s
    steps = None if gap_s is None or not step_s else gap_s / step_s
    return MigrationResult(
        live.request_id, finished.outcome.value, finished.why, state.destination, state.warm_s, gap_s, steps
    )
