"""The interface through which a service calls another one.

`self.worker.generate(request)` makes a `Call`. If the endpoint is an async generator, iterate over the call; if it is a
coroutine, await the call:

    async for text in self.worker.generate(request): ...
    answer = await self.worker.count(request)

A call starts when it is first iterated or awaited, and can be used once. It raises RpcError if the other service cannot
be reached, sends nothing for too long, or raises. Closing a call early cancels the work of the other service. After
`break` in an `async for`, the interpreter closes the call at some later time: hold it in `contextlib.aclosing(call)`
where that matters.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Generator
from typing import Any, Protocol

from dynamo_local.core.errors import RpcError


class EndpointClient(Protocol):
    """A client of one endpoint of another service."""

    def __call__(self, request: Any = None) -> Call: ...


class ServiceClient(Protocol):
    """A client of another service. Each attribute is an endpoint; an unknown name raises AttributeError."""

    def __getattr__(self, name: str) -> EndpointClient: ...


class Call:
    """A call of an endpoint. Wraps the asynchronous generator of the replies."""

    def __init__(self, name: str, replies: AsyncGenerator[Any, None]) -> None:
        self._name = name
        self._replies = replies

    def __aiter__(self) -> AsyncIterator[Any]:
        # The generator itself, not this object: the event loop closes only abandoned generators.
        return self._replies

    def __await__(self) -> Generator[Any, None, Any]:
        return self._only().__await__()

    async def aclose(self) -> None:
        """End the call. Cancels the other service's work on it if that has not ended."""
        await self._replies.aclose()

    async def _only(self) -> Any:
        try:
            answers = [reply async for reply in _at_most(self._replies, 2)]
        finally:
            await self._replies.aclose()
        if len(answers) != 1:
            found = "nothing" if not answers else "a stream"
            raise RpcError(f"{self._name} answered with {found} where one reply was awaited", "iterate over the call")
        return answers[0]


async def _at_most(replies: AsyncGenerator[Any, None], count: int) -> AsyncIterator[Any]:
    async for reply in replies:
        yield reply
        count -= 1
        if count == 0:
            return
