"""Requests that wait for a worker, woken in the order in which an engine would serve them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from dynamo_local.core.ports import Request
from dynamo_local.core.priority.fair_queue import Claim, in_turn


class WaitingLine:
    """Requests of one frontend that ask again when the fleet has changed."""

    def __init__(self) -> None:
        self._requests: dict[asyncio.Future[None], Request] = {}

    @contextmanager
    def joined(self, request: Request) -> Iterator[asyncio.Future[None]]:
        """Let a request stand in the line. Gives a future that is done with the next call of `wake`."""
        woken = asyncio.get_running_loop().create_future()
        self._requests[woken] = request
        try:
            yield woken
        finally:
            del self._requests[woken]

    def wake(self) -> None:
        """Wake all that stand in the line. Those that are waiting go on in order."""
        waiting = [woken for woken in self._requests if not woken.done()]
        if len(waiting) > 1:
            waiting = in_turn(waiting, self._claim, lambda woken: len(self._requests[woken].prompt_token_ids))
        for woken in waiting:
            woken.set_result(None)

    def _claim(self, woken: asyncio.Future[None], number: int) -> Claim:
        request = self._requests[woken]
        return Claim(request.priority, request.arrival_time, number, request.key)
