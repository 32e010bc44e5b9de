"""Sends tokens to frontends, in messages no larger than the bus takes."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from dynamo_local.core import codec
from dynamo_local.core.errors import BusError
from dynamo_local.core.messages.work import Fault, RequestEpoch, TokenBatch, TokenDelta
from dynamo_local.core.request.log import Outbox
from dynamo_local.process.context import ServiceContext
from dynamo_local.tasks import TaskGuard

_log = logging.getLogger(__name__)


class TokenSender:
    """Publishes token batches, numbered for each frontend (`TokenBatch.seq`)."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._sequence: Counter[str] = Counter()

    async def send(self, frontend: str, deltas: tuple[TokenDelta, ...]) -> list[RequestEpoch]:
        """Publish deltas. Returns requests that were failed, because one delta of theirs is too large for the bus."""
        data = codec.encode(TokenBatch(self._context.lease, self._sequence[frontend] + 1, deltas))
        if len(data) > self._context.bus.max_payload:
            return await self._send_parts(frontend, deltas)
        self._sequence[frontend] += 1
        try:
            await self._context.bus.publish(self._context.subjects.tokens(frontend), data)
        except BusError as error:
            # Not sent again here: the frontend notices the missing positions, and asks for them.
            _log.warning("tokens for frontend %s could not be sent: %s", frontend, error)
        return []

    async def _send_parts(self, frontend: str, deltas: tuple[TokenDelta, ...]) -> list[RequestEpoch]:
        if len(deltas) > 1:
            middle = len(deltas) // 2
            too_large = await self.send(frontend, deltas[:middle])
            return too_large + await self.send(frontend, deltas[middle:])
        request = RequestEpoch(deltas[0].request_id, deltas[0].epoch)
        why = _too_large(deltas[0], self._context.bus.max_payload)
        await self.send(frontend, (error_delta(request, why, fault="request"),))
        return [request]

    def forget(self, frontend: str) -> None:
        """Drop the count of a frontend that is gone."""
        self._sequence.pop(frontend, None)


def _too_large(delta: TokenDelta, most: int) -> str:
    if delta.pooled is None:
        return "the log-probabilities asked for are more than can be sent"
    return f"the pooled output has {len(delta.pooled.data)} bytes, and at most {most} can be sent: shorten the input"


def error_delta(request: RequestEpoch, why: str, *, refused: bool = False, fault: Fault | None = None) -> TokenDelta:
    """A delta that ends an epoch with an error. For `refused` and `fault` see `TokenDelta`."""
    return TokenDelta(request.request_id, request.epoch, 0, [], finish="error", error=why, refused=refused, fault=fault)


# Finished requests that no frontend has acknowledged: their last delta is sent again, and dropped in the end.

UNACKNOWLEDGED_S = 60.0
"""How long the last delta of a request is kept for a frontend that is alive and does not acknowledge it."""

RESEND_AFTER_S = 5.0
"""Interval at which such a delta is sent again: the frontend's acknowledgement (`Cancel`) may have been lost, without
which the blocks of a prefill stay held."""

_MAX_RESENT = 64
"""Deltas sent again in one call of `look`, at most."""


class Unacknowledged:
    """Looks after the outbox of one worker. `drop` forgets requests; `publish(frontend, deltas)` sends deltas."""

    def __init__(
        self,
        outbox: Outbox,
        drop: Callable[[list[RequestEpoch]], Awaitable[None]],
        publish: Callable[[str, tuple[TokenDelta, ...]], Awaitable[None]],
        resend_after_s: float,
    ) -> None:
        self._outbox = outbox
        self._drop = drop
        self._publish = publish
        self._resend_after_s = resend_after_s

    async def look(self, now: float) -> None:
        """Send again, or drop, the deltas whose time has come."""
        await self._drop(self._outbox.finished_before(now - UNACKNOWLEDGED_S))
        for frontend, end in self._outbox.resend_ends(now, now - self._resend_after_s, _MAX_RESENT):
            await self._publish(frontend, (end,))


# Frontends that have fallen silent: their requests are dropped after a grace period, unless they are heard again.

GRACE_S = 8.0
"""How long a frontend may be silent before its requests are dropped. Longer than the silence after which a worker
counts as gone (fleet.TTL_S): a request can continue on another worker, but not at another frontend."""


class FrontendLiveness:
    """Calls `forget` for each frontend that has been silent for `grace_s` without a break."""

    def __init__(self, tasks: TaskGuard, grace_s: float, forget: Callable[[str], Coroutine[Any, Any, None]]) -> None:
        self._tasks = tasks
        self._grace_s = grace_s
        self._forget = forget
        self._waiting: dict[str, asyncio.Task[Any]] = {}

    def lost(self, frontend: str) -> None:
        """Start the grace period of a frontend that has fallen silent."""
        self.heard(frontend)
        self._waiting[frontend] = self._tasks.spawn("frontend gone", self._wait(frontend))

    def heard(self, frontend: str) -> None:
        """End the grace period: the frontend is heard again."""
        if (waiting := self._waiting.pop(frontend, None)) is not None:
            waiting.cancel()

    async def _wait(self, frontend: str) -> None:
        await asyncio.sleep(self._grace_s)
        # Removed first: `heard` must not cancel a call of `forget` halfway.
        del self._waiting[frontend]
        await self._forget(frontend)
