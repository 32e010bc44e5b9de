"""Frontends that have fallen silent: their requests are dropped after a grace period, unless they are heard again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from dynamo_local.tasks import TaskGuard

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
