"""Calls of applications that begin before their model has a worker, so that what is wrong with them is known first."""

from __future__ import annotations

import asyncio
from types import TracebackType

from components.frontend.deferral import Deferral
from dynamo_local.core.http.asgi import App, Receive, Scope, Send

_END_S = 5.0
"""Longest wait for a call that was cancelled, in seconds."""


class EarlyCall:
    """A call of an application that goes on to a worker only when it is told to. Ended with the context at the latest.

    `task` ends with the call's answer: before anything was submitted, if that is a refusal.
    """

    def __init__(self, app: App, scope: Scope, receive: Receive, send: Send) -> None:
        self.app = app
        self._deferral = Deferral()
        self.task = asyncio.create_task(self._run(scope, receive, send), name="call of a request without a worker")

    async def __aenter__(self) -> EarlyCall:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.end()

    async def examined(self) -> bool:
        """Wait until the application has examined the request. Returns False if it has answered it instead."""
        reached = asyncio.create_task(self._deferral.reached.wait(), name="examination of a request")
        try:
            await asyncio.wait({self.task, reached}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            reached.cancel()
        return not self.task.done()

    def go_on(self) -> None:
        """Submit to workers what the application has submitted so far, and will."""
        self._deferral.release()

    async def end(self) -> None:
        """Cancel the call if it is under way. What it raises concerns nobody any more."""
        self.task.cancel()
        self.task.add_done_callback(_forget)
        await asyncio.wait({self.task}, timeout=_END_S)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._deferral.apply()
        await self.app(scope, receive, send)


def _forget(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()
