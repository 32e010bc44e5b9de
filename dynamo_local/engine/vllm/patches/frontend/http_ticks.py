"""uvicorn's own housekeeping, once a second. It wakes up ten times a second to see whether it is to end."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import Any

from dynamo_local.engine.vllm.patches.check import applies

_TICK_S = 1.0
"""The answers' `date` is as old at most."""


class Ending:
    """Tells one uvicorn server to end, which does not look for that by itself any more."""

    def __init__(self, server: Any) -> None:
        """Call before the server serves."""
        self._server = server
        self._told = asyncio.Event()
        if applies("uvicorn's ticks"):
            server.main_loop = partial(_main_loop, server, self._told)

    def tell(self) -> None:
        """Have it take no new connection and end with the last request."""
        self._server.should_exit = True
        self._told.set()


async def _main_loop(server: Any, told: asyncio.Event) -> None:
    # At tick 0, as at each tenth, it renews the date.
    while not await server.on_tick(0):
        with suppress(TimeoutError):
            async with asyncio.timeout(_TICK_S):
                await told.wait()
