"""Bounded number of HTTP connections: those that wait for their clients make room for new ones. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import Generic, TypeVar

_C = TypeVar("_C")

GRACE_S = 1.0
"""Time for which a waiting connection need not make room for another one: its client may be about to send."""


def is_due(own: int, elsewhere: Collection[int]) -> bool:
    """Whether a process that has `own` connections may take the next one at once, since it has no more than its part of
    all. `elsewhere`: those of each other process. Of all processes, some are due."""
    return own * (len(elsewhere) + 1) <= own + sum(elsewhere)


class ConnectionSlots(Generic[_C]):
    """Room for a number of connections. `now` is any clock that does not go back."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._inside: set[_C] = set()
        self._waiting: dict[_C, float] = {}
        """Connections whose client is to send something, with since when. The first has waited longest."""

    def __len__(self) -> int:
        return len(self._inside)

    def enter(self, connection: _C, now: float, elsewhere: int = 0) -> tuple[bool, _C | None]:
        """Whether there is room, and which connection has to leave for that, if one has to. `elsewhere`: connections
        of others that take up the same room.

        A connection that has entered waits for its client.
        """
        leaving = None
        if len(self._inside) + elsewhere >= self._size:
            leaving = self.leave_longest(now)
            if leaving is None:
                return False, None
        self._inside.add(connection)
        self._waiting[connection] = now
        return True, leaving

    def leave_longest(self, now: float) -> _C | None:
        """Have the connection leave that has waited longest. None: there is none that would have to make room."""
        leaving = next(iter(self._waiting), None)
        if leaving is None or now - self._waiting[leaving] < GRACE_S:
            return None
        self.leave(leaving)
        return leaving

    def served(self, connection: _C) -> None:
        """Note that the connection's request is complete: it is the server's turn now."""
        self._waiting.pop(connection, None)

    def waits(self, connection: _C, now: float) -> None:
        """Note that it is the client's turn again. Of a connection that has left, nothing is noted."""
        if connection in self._inside and connection not in self._waiting:
            self._waiting[connection] = now

    def leave(self, connection: _C) -> None:
        """The connection is closed, or is to be. Those that are not inside may leave as well."""
        self._inside.discard(connection)
        self._waiting.pop(connection, None)
