"""uvicorn's housekeeping once a second, instead of ten times a second to see whether it is to end."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import Any

from dynamo_local.engine.vllm.patches.table import applies

_TICK_S = 1.0
"""Interval of the housekeeping. The answers' `date` is as old at most."""


class UvicornStop:
    """Ends one uvicorn server, which does not look for that by itself any more."""

    def __init__(self, server: Any) -> None:
        """Call before the server serves."""
        self._server = server
        self._stopping = asyncio.Event()
        if applies("uvicorn's ticks"):
            server.main_loop = partial(_main_loop, server, self._stopping)

    def stop(self) -> None:
        """Let the server take no new connection and end with the last request."""
        self._server.should_exit = True
        self._stopping.set()


async def _main_loop(server: Any, stop: asyncio.Event) -> None:
    # At tick 0, as at each tenth, it renews the date.
    while not await server.on_tick(0):
        with suppress(TimeoutError):
            async with asyncio.timeout(_TICK_S):
                await stop.wait()
