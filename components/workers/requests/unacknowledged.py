"""Finished requests that no frontend has acknowledged: their last delta is sent again, and dropped in the end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from dynamo_local.core.messages.tokens import TokenDelta
from dynamo_local.core.messages.work import RequestEpoch
from dynamo_local.core.request.log import Outbox

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
