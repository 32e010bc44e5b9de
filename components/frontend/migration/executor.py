"""Carries out single migrations: asks the destination, makes the cut, and waits for the first token there.

What to do when is decided in core/migration/protocol.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import replace

from components.frontend.migration.state import MigrationState
from components.frontend.migration.statistics import MigrationStatistics
from components.frontend.requests.live_requests import LiveRequest
from components.frontend.requests.request_table import RequestTable
from components.frontend.worker_link import WorkerLink
from dynamo_local.core.errors import BusError, DecodeError
from dynamo_local.core.messages.admin import MigrationResult
from dynamo_local.core.messages.migration import MigrationAnswer, Reserve, Warm
from dynamo_local.core.migration import protocol
from dynamo_local.core.migration.protocol import Finished, LogSeen, Migration, MigrationLimits

_log = logging.getLogger(__name__)


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
