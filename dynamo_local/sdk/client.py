"""What a service sees of another one.

`self.worker.generate(request)` makes a `Call`. Iterating over it streams the replies of an endpoint that is
an async generator; awaiting it gives the reply of an endpoint that is a coroutine:

    async for text in self.worker.generate(request): ...
    answer = await self.worker.count(request)

A call starts when it is first iterated or awaited, and can be used once. It ends with an RpcError if the
other side cannot be reached, falls silent, or raises. Closing it early cancels the work on the other side;
leaving an `async for` by `break` does so only once the interpreter gets to it, so hold the call in
`contextlib.aclosing(call)` where that matters.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Generator
from typing import Any, Protocol

from dynamo_local.core.errors import RpcError


class EndpointClient(Protocol):
    """One endpoint of another service."""

    def __call__(self, request: Any = None) -> Call: ...


class ServiceClient(Protocol):
    """Another service: each attribute is one of its endpoints. An unknown one raises AttributeError."""

    def __getattr__(self, name: str) -> EndpointClient: ...


class Call:
    """One use of an endpoint, over the asynchronous generator of its replies."""

    def __init__(self, name: str, replies: AsyncGenerator[Any, None]) -> None:
        self._name = name
        self._replies = replies

    def __aiter__(self) -> AsyncIterator[Any]:
        # The generator itself, not this object: an abandoned generator is closed by the event loop.
        return self._replies

    def __await__(self) -> Generator[Any, None, Any]:
        return self._only().__await__()

    async def aclose(self) -> None:
        """End the call; cancels the work on the other side if it has not ended."""
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
