"""Calls of applications that can be ended: those of the frontend's own requests, and those that begin before their
model has a worker, so that what is wrong with them is known first."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from components.frontend.deferral import Deferral
from components.frontend.http.own_requests import is_own
from dynamo_local.core.http.asgi import App, Event, Receive, Scope, Send
from dynamo_local.tasks import unless

_END_S = 5.0
"""Longest wait for a call whose client has gone, in seconds."""


class ApplicationCall:
    """A call of an application in a task of its own, ended with the context at the latest.

    It is ended as if its client had gone: vLLM's application has engines go on with a request whose call is merely
    cancelled.
    """

    def __init__(self, app: App, scope: Scope, receive: Receive, send: Send) -> None:
        self.app = app
        self._from_client, self._to_client = receive, send
        self._ended = asyncio.Event()
        self.task = asyncio.create_task(self._run(scope), name=f"call of {scope['path']}")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.end()

    async def answered(self) -> None:
        """Wait for the answer. Raises what the application raises."""
        await asyncio.shield(self.task)

    async def end(self) -> None:
        """End the call if it is under way. What it answers or raises then concerns nobody any more."""
        self._ended.set()
        self.task.add_done_callback(_forget)
        await asyncio.wait({self.task}, timeout=_END_S)
        self.task.cancel()

    async def _run(self, scope: Scope) -> None:
        await self.app(scope, self._receive, self._send)

    async def _receive(self) -> Event:
        events: list[Event] = []

        async def take() -> None:
            events.append(await self._from_client())

        await unless(self._ended.wait(), take())
        return events[0] if events else {"type": "http.disconnect"}

    async def _send(self, event: Event) -> None:
        if not self._ended.is_set():
            await self._to_client(event)


class EarlyCall(ApplicationCall):
    """A call of an application that goes on to a worker only when it is told to.

    `task` ends with the call's answer: before anything was submitted, if that is a refusal.
    """

    def __init__(self, app: App, scope: Scope, receive: Receive, send: Send) -> None:
        self._deferral = Deferral()
        super().__init__(app, scope, receive, send)

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

    async def _run(self, scope: Scope) -> None:
        self._deferral.apply()
        await super()._run(scope)


async def pass_on(app: App, scope: Scope, receive: Receive, send: Send) -> None:
    """Have an application answer a request."""
    if not is_own(scope):
        # Its client tells the application itself that it leaves, and a task would cost as much as the gate.
        await app(scope, receive, send)
        return
    async with ApplicationCall(app, scope, receive, send) as call:
        await call.answered()


def _forget(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()
