"""Requests that wait for a worker, woken by priority, then by arrival."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from dynamo_local.core.ports import Request


class WaitingLine:
    """Requests of one frontend that ask again when the fleet has changed."""

    def __init__(self) -> None:
        self._orders: dict[asyncio.Future[None], tuple[int, float]] = {}

    @contextmanager
    def joined(self, request: Request) -> Iterator[asyncio.Future[None]]:
        """Let a request stand in the line. Gives a future that is done with the next call of `wake`."""
        woken = asyncio.get_running_loop().create_future()
        self._orders[woken] = request.priority, request.arrival_time
        try:
            yield woken
        finally:
            del self._orders[woken]

    def wake(self) -> None:
        """Wake all that stand in the line. Those that are waiting go on in order."""
        for woken in sorted(self._orders, key=self._orders.__getitem__):
            if not woken.done():
                woken.set_result(None)
