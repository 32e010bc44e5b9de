"""Reports the progress of services while they come up, by their presences."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from dynamo_local.core.fleet.view import WORKER_ROLES, Change, Happened
from dynamo_local.core.messages.presence import Presence
from dynamo_local.supervisor.server.report import Report


class Progress:
    """Follows presences. `all_ready` is set once every expected watcher has announced that it is ready. `on_ready` is
    called with each watcher that does."""

    def __init__(self, expected: Iterable[str], report: Report, on_ready: Callable[[str], None]) -> None:
        self._expected = tuple(expected)
        self._report = report
        self._on_ready = on_ready
        self._last: dict[str, Presence] = {}
        self.all_ready = asyncio.Event()

    def on_change(self, change: Change) -> None:
        """Note a change of the fleet, and report it if it changes a state or detail."""
        presence = change.presence
        name = presence.watcher
        if change.what in (Happened.LEFT, Happened.REVOKED) and not change.failed:
            if name in self._last and self._last[name].lease == presence.lease:
                del self._last[name]
            return
        before = self._last.get(name)
        self._last[name] = presence
        if before is None or _shown(before) != _shown(presence):
            self._report.step(f"{name}  {described(presence)}")
        if presence.state == "ready":
            self._on_ready(name)
        if all(self._is_ready(watcher) for watcher in self._expected):
            self.all_ready.set()

    def presence(self, watcher: str) -> Presence | None:
        """The last presence of the watcher's process, if it is still there."""
        return self._last.get(watcher)

    def not_ready(self) -> str:
        """The watchers that are not ready, each with its last state, in words."""
        awaited = [watcher for watcher in self._expected if not self._is_ready(watcher)]
        return ", ".join(f"{watcher} ({self._last_state(watcher)})" for watcher in awaited)

    def summary(self) -> str:
        """The model that is served and the number of workers, in words."""
        present = [self._last[watcher] for watcher in self._expected if watcher in self._last]
        workers = [presence for presence in present if presence.role in WORKER_ROLES]
        models = sorted({presence.engine.model for presence in workers if presence.engine is not None})
        if not workers:
            return _count(len(present), "service process", "service processes")
        count = _count(len(workers), "worker", "workers")
        return f"model {', '.join(models)}, {count}" if models else count

    def _is_ready(self, watcher: str) -> bool:
        presence = self._last.get(watcher)
        return presence is not None and presence.state == "ready"

    def _last_state(self, watcher: str) -> str:
        presence = self._last.get(watcher)
        return "not heard of" if presence is None else described(presence)


def described(presence: Presence) -> str:
    """State and detail in words, such as "starting: loading weights"."""
    return f"{presence.state}: {presence.detail}" if presence.detail else presence.state


def _shown(presence: Presence) -> tuple[str, str, str]:
    return presence.lease, presence.state, presence.detail


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
