"""Logs of processes on other nodes, which the server asks for. For `dynamo logs`."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

from dynamo_local.core.errors import BusError, NotRunningError, SilentNodeError, StateError, SupervisorError
from dynamo_local.supervisor.server.reports.logs import selectors
from state.paths import StatePaths
from state.statefile.store import StateStore

if TYPE_CHECKING:
    from dynamo_local.supervisor.places.far import FarPlaces


_ASK_AGAIN_S = 5.0
"""Time until a node is asked again that did not answer: it is waited for 2 s, and its other logs wait too."""


class FarLogs:
    """The logs of a server's processes on other nodes; none where there are no others, or no server. Use as a context
    manager. Each method blocks until the node has answered. `clock`: seconds."""

    def __init__(self, paths: StatePaths, clock: Callable[[], float] = time.monotonic) -> None:
        self._paths = paths
        self._clock = clock
        self._nodes: dict[str, str] = {}
        """By watcher."""
        self._silent: dict[str, float] = {}
        """When nodes were asked last, of those that did not answer."""
        self._runner = asyncio.Runner()
        self._stack = AsyncExitStack()
        self._places: FarPlaces | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._places is not None:
            self._runner.run(self._stack.aclose())
        self._runner.close()

    def select(self, selector: str | None) -> tuple[str, ...]:
        """Names of the processes on other nodes that `selector` selects, as `reports.logs.select` takes it."""
        try:
            state = StateStore(self._paths).read()
        except (NotRunningError, StateError):
            return ()
        far = [entry for entry in state.components.values() if entry.holds and entry.node != state.node]
        self._nodes |= {entry.watcher_name: entry.node for entry in far}
        return tuple(
            entry.watcher_name
            for entry in far
            if selector is None or selector in selectors(entry.watcher_name, entry.watcher)
        )

    def follower(self, watcher: str) -> FarFollower:
        """Reads the log of a process on another node."""
        return FarFollower(self, watcher)

    def read(self, watcher: str, lines: int, after: int | None) -> tuple[tuple[str, ...], int | None]:
        """Lines, and the offset after them; none, and `after`, of a log that cannot be read now. If its node does not
        answer, the next one of that node is not waited for."""
        node = self._nodes.get(watcher, "")
        if self._clock() - self._silent.get(node, -math.inf) < _ASK_AGAIN_S:
            return (), after
        try:
            found = self._runner.run(self._read(watcher, lines, after))
        except (BusError, SilentNodeError):
            self._silent[node] = self._clock()
            return (), after
        except SupervisorError:
            return (), after
        self._silent.pop(node, None)
        return found

    async def _read(self, watcher: str, lines: int, after: int | None) -> tuple[tuple[str, ...], int]:
        if self._places is None:
            # Here, since logs of this machine are read without the NATS client.
            from dynamo_local.supervisor.admin.connect import bus_of
            from dynamo_local.supervisor.places.far import places_of_graph

            bus = await self._stack.enter_async_context(bus_of(self._paths, "logs"))
            self._places = places_of_graph(bus, self._paths)
        part = await self._places.log(watcher, lines, after)
        return part.lines, part.end


@dataclass
class FarFollower:
    """Reads a log on another node as it grows, as `reports.logs.Follower` does one here."""

    logs: FarLogs
    watcher: str
    _offset: int | None = 0
    """None: the last lines were asked for, and no answer came."""
    _last: int = 0
    """How many of these were asked for."""

    def last_lines(self, lines: int) -> list[str]:
        """The last lines of the log as it is now: so many, and no more than fit into a message."""
        found, self._offset = self.logs.read(self.watcher, lines, None)
        self._last = lines
        return list(found)

    def new_lines(self) -> list[str]:
        """The lines that were added since the last call; the last ones if that had no answer."""
        lines = self._last if self._offset is None else 1000
        found, self._offset = self.logs.read(self.watcher, lines, self._offset)
        return list(found)
