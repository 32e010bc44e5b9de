"""Frontends that are missed. One that was only unheard for a while has lost nothing, and has all its grace again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from dynamo_local.tasks import TaskGuard

GRACE_S = 8.0
"""How long a frontend may be missed before its requests are dropped. (Its own workers it gives 2 s: they can be
replaced, it cannot.)"""


class FrontendLiveness:
    """`forget` is awaited for a frontend that has been missed for `grace_s` without a break."""

    def __init__(self, tasks: TaskGuard, grace_s: float, forget: Callable[[str], Coroutine[Any, Any, None]]) -> None:
        self._tasks = tasks
        self._grace_s = grace_s
        self._forget = forget
        self._waiting: dict[str, asyncio.Task[Any]] = {}

    def begin(self, frontend: str) -> None:
        """It is missed."""
        self.end(frontend)
        self._waiting[frontend] = self._tasks.spawn("frontend gone", self._wait(frontend))

    def end(self, frontend: str) -> None:
        """It is there again."""
        if (waiting := self._waiting.pop(frontend, None)) is not None:
            waiting.cancel()

    async def _wait(self, frontend: str) -> None:
        await asyncio.sleep(self._grace_s)
        # What has begun is not cancelled in the middle.
        del self._waiting[frontend]
        await self._forget(frontend)
