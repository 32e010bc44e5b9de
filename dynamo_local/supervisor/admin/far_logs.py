"""Logs of processes on other nodes, which the server reads. For `dynamo logs`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dynamo_local.control.client import ControlClient
from dynamo_local.control.operations import GET_LOG
from dynamo_local.core.errors import NotRunningError, StateError, SupervisorError
from dynamo_local.supervisor.server.reports.logs import selectors
from state.paths import StatePaths
from state.statefile.store import StateStore

_MOST_LINES = 1000


def select_far(paths: StatePaths, selector: str | None) -> tuple[str, ...]:
    """Names of the processes on other nodes that `selector` selects, as `reports.logs.select` takes it; none where no
    server runs."""
    try:
        state = StateStore(paths).read()
    except (NotRunningError, StateError):
        return ()
    return tuple(
        entry.watcher_name
        for entry in state.components.values()
        if entry.holds
        and entry.node != state.node
        and (selector is None or selector in selectors(entry.watcher_name, entry.watcher))
    )


@dataclass
class FarFollower:
    """Reads a log on another node as it grows, as `reports.logs.Follower` does one here. Nothing can be read of a node
    that does not answer."""

    client: ControlClient
    watcher: str
    _offset: int | None = 0
    """None: the last lines were asked for, and no answer came."""
    _last: int = 0
    """How many of these were asked for."""

    def last_lines(self, lines: int) -> list[str]:
        """The last lines of the log as it is now: so many, and no more than fit into a message."""
        self._offset, self._last = None, lines
        return self._read(lines)

    def new_lines(self) -> list[str]:
        """The lines that were added since the last call; the last ones if that had no answer."""
        return self._read(self._last if self._offset is None else _MOST_LINES)

    def _read(self, lines: int) -> list[str]:
        query = {"lines": str(lines)} | ({} if self._offset is None else {"after": str(self._offset)})
        try:
            found: Any = self.client.do(GET_LOG, query=query, watcher=self.watcher)
        except (NotRunningError, SupervisorError):
            return []
        self._offset = found["end"]
        return list(found["lines"])
