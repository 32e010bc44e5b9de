"""A connection to one of circusd's endpoints."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import zmq.asyncio

_RECONNECT_MS = 20


class CircusSocket:
    """A zmq socket that connects to circusd, and to its replacement when circusd dies.

    Use as an async context manager.
    """

    def __init__(self, endpoint: str, kind: int) -> None:
        self._endpoint = endpoint
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(kind)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)

    async def __aenter__(self) -> Self:
        self._socket.connect(self._endpoint)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
        self._context.term()
