"""Ends of requests that their frontends have not acknowledged: told again now and then, forgotten in the end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from dynamo_local.core.messages.tokens import TokenDelta
from dynamo_local.core.messages.work import RequestEpoch
from dynamo_local.core.request.outbox import Outbox

UNACKNOWLEDGED_S = 60.0
"""How long the end of a request is kept for a frontend that is there and does not ask for it."""

TELL_AGAIN_S = 5.0
"""How often such an end is told again until then: what the frontend answered, `Cancel`, may have been lost, and keeps
the blocks of a prefill."""

_TOLD_AT_ONCE = 64
"""Ends told again at one look."""


class Unacknowledged:
    """Of one worker. `drop` forgets requests, `publish` sends a frontend what it is to hear at that time."""

    def __init__(
        self,
        outbox: Outbox,
        drop: Callable[[list[RequestEpoch]], Awaitable[None]],
        publish: Callable[[str, float, tuple[TokenDelta, ...]], Awaitable[None]],
        tell_again_s: float,
    ) -> None:
        self._outbox = outbox
        self._drop = drop
        self._publish = publish
        self._tell_again_s = tell_again_s

    async def look(self, now: float) -> None:
        """Tell or forget those whose time has come."""
        await self._drop(self._outbox.finished_before(now - UNACKNOWLEDGED_S))
        for frontend, end in self._outbox.resend_ends(now, now - self._tell_again_s, _TOLD_AT_ONCE):
            await self._publish(frontend, now, (end,))
