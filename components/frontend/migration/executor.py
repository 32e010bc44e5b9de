"""Carrying out single moves: asks the destination, makes the cut, and waits for the first token there.

What to do when is decided in core/migration/protocol.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import Any

from components.frontend.assigner import Assigner
from components.frontend.migration.state import MigrationState
from components.frontend.requests import LiveRequest, Placer
from dynamo_local.bus.nats import Bus
from dynamo_local.core import codec
from dynamo_local.core.errors import BusError, DecodeError
from dynamo_local.core.messages.admin import MigrationResult
from dynamo_local.core.messages.migration import CancelReservation, MigrationAnswer, MigrationRequest, Reserve, Warm
from dynamo_local.core.messages.work import Cancel
from dynamo_local.core.migration import protocol
from dynamo_local.core.migration.protocol import Finished, LogSeen, Migration, MigrationLimits
from dynamo_local.core.names import Subjects

_log = logging.getLogger(__name__)


class MigrationExecutor:
    """Of one frontend. `is_live` says whether a request is still wanted, `is_routable` whether a worker takes some;
    `tell` says something to a worker, `lose` has an epoch continued elsewhere."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        lease: str,
        placer: Placer,
        assigner: Assigner,
        is_live: Callable[[LiveRequest], bool],
        is_routable: Callable[[str], bool],
        tell: Callable[[str, Cancel], Coroutine[Any, Any, None]],
        lose: Callable[[LiveRequest, int], Coroutine[Any, Any, None]],
        limits: MigrationLimits | None = None,
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._lease = lease
        self._placer = placer
        self._assigner = assigner
        self._is_live = is_live
        self._is_routable = is_routable
        self._tell = tell
        self._lose = lose
        self._limits = limits or MigrationLimits()
        self.pulled_tokens = 0
        """Whose KV was read from a source, in all moves so far."""
        self.pulled_bytes = 0
        """Of that KV, as far as the destinations tell."""

    async def carry_out(self, live: LiveRequest, moving: MigrationState) -> MigrationResult:
        """Move the request, unless something comes between. Never raises for what others do."""
        limits = replace(self._limits, rounds=0) if moving.cold else self._limits
        move = Migration(self._seen(live, moving), moving.destination, limits)
        step_s = live.pace.step_s
        refused: str | None = None
        while not isinstance(action := move.advance(self._seen(live, moving), time.monotonic(), refused), Finished):
            refused = None
            match action:
                case protocol.Reserve():
                    question = Reserve(live.request_id, self._lease, action.tokens, action.until, moving.floor)
                    refused = await self._ask(live, moving, move, question, self._limits.reserve_s)
                case protocol.Warm():
                    refused = await self._ask(live, moving, move, self._warm(live, action), self._limits.warm_s)
                case protocol.Await():
                    await _changed(moving, action.until)
                case protocol.Cut():
                    step_s = live.pace.step_s
                    await self._cut(live, moving)
        if action.gives_back:
            await self._say(moving.destination, CancelReservation(live.request_id))
        return _result(live, moving, action, step_s)

    def _seen(self, live: LiveRequest, moving: MigrationState) -> LogSeen:
        log, is_live = live.log, self._is_live(live) and not live.log.finished
        return LogSeen(log.epoch, log.worker, live.tokens, is_live, self._is_routable(moving.destination))

    def _warm(self, live: LiveRequest, action: protocol.Warm) -> Warm:
        assert live.log.worker is not None, "only a request that has an owner is moved"
        context = [*live.request.prompt_token_ids, *live.log.tokens][: action.tokens]
        request = live.request
        return Warm(
            live.request_id,
            live.log.worker,
            context,
            action.until,
            cache_salt=request.cache_salt,
            adapter=request.adapter,
            priority=request.priority,
        )

    async def _ask(
        self, live: LiveRequest, moving: MigrationState, move: Migration, question: Reserve | Warm, timeout_s: float
    ) -> str | None:
        """Why it is refused, or None. The answer is not waited for when the move is over without it."""
        subject = self._subjects.moves(moving.destination)
        asking = asyncio.ensure_future(self._bus.request(subject, codec.encode(question), timeout_s=timeout_s))
        try:
            while not asking.done():
                if not move.is_on(self._seen(live, moving)):
                    return "it was not waited for"
                await _either(asking, moving.changed)
            answer = codec.decode(asking.result(), MigrationAnswer)
        except (BusError, DecodeError) as error:
            moving.unanswered = True
            return str(error)
        finally:
            asking.cancel()
        self.pulled_tokens += answer.pulled_tokens
        self.pulled_bytes += answer.pulled_bytes or 0
        return answer.refused

    async def _cut(self, live: LiveRequest, moving: MigrationState) -> None:
        # No token may come between the decision and the new epoch: nothing is awaited before it is minted.
        old, source = live.log.current, live.log.worker
        assert source is not None, "only a request that has an owner is cut"
        moving.cut_at, moving.left_at = time.monotonic(), live.pace.last
        moving.changed.clear()
        current = live.log.assign(moving.destination)
        try:
            await self._placer.send(live, current, moving.destination)
        except BusError as error:
            _log.warning("request %s could not be handed over: %s", live.request_id, error)
            await self._lose(live, current.epoch)
        await self._tell(source, Cancel((old,)))
        if self._is_live(live) and live.log.current == current:
            # Otherwise it has ended, or been assigned anew, and was charged accordingly.
            await self._assigner.moved(live.request_id, moving.destination, live.tokens)

    async def _say(self, worker: str, word: MigrationRequest) -> None:
        """Say something that is of no consequence if it is lost."""
        try:
            await self._bus.publish(self._subjects.moves(worker), codec.encode(word))
        except BusError as error:
            _log.warning("%s keeps room for nobody for a while: %s", worker, error)


async def _either(asking: asyncio.Future[bytes], changed: asyncio.Event) -> None:
    """Wait for the answer, or a change from now on."""
    changed.clear()
    changing = asyncio.ensure_future(changed.wait())
    try:
        await asyncio.wait((asking, changing), return_when=asyncio.FIRST_COMPLETED)
    finally:
        changing.cancel()


async def _changed(moving: MigrationState, until: float) -> None:
    """Wait until the request's log may have changed, or until then."""
    with suppress(TimeoutError):
        async with asyncio.timeout(max(until - time.monotonic(), 0.0)):
            await moving.changed.wait()
    moving.changed.clear()


def _result(live: LiveRequest, moving: MigrationState, over: Finished, step_s: float | None) -> MigrationResult:
    gap_s = moving.gap_s
    steps = None if gap_s is None or not step_s else gap_s / step_s
    return MigrationResult(
        live.request_id, over.outcome.value, over.why, moving.destination, moving.warm_s, gap_s, steps
    )
