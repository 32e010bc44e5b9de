"""What is known of the services while they come up, and what is said about it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from dynamo_local.core.fleet.view import WORKER_ROLES, Change, Happened
from dynamo_local.core.messages.presence import Presence
from dynamo_local.supervisor.server.report import Report


class Progress:
    """Follows presences. `all_ready` is set once every expected watcher has said that it is ready."""

    def __init__(self, expected: Iterable[str], report: Report, on_ready: Callable[[str], None]) -> None:
        self._expected = tuple(expected)
        self._report = report
        self._on_ready = on_ready
        self._last: dict[str, Presence] = {}
        self.all_ready = asyncio.Event()

    def on_change(self, change: Change) -> None:
        """Take in a change of the fleet."""
        presence = change.presence
        name = presence.watcher
        if change.what in (Happened.LEFT, Happened.REVOKED) and not change.failed:
            if name in self._last and self._last[name].lease == presence.lease:
                del self._last[name]
            return
        before = self._last.get(name)
        self._last[name] = presence
        if before is None or _told(before) != _told(presence):
            self._report.step(f"{name}  {described(presence)}")
        if presence.state == "ready":
            self._on_ready(name)
        if all(self._is_ready(watcher) for watcher in self._expected):
            self.all_ready.set()

    def presence(self, watcher: str) -> Presence | None:
        """The last word of the watcher's process, if it is there."""
        return self._last.get(watcher)

    def not_ready(self) -> str:
        """Who is awaited, and what each last said."""
        awaited = [watcher for watcher in self._expected if not self._is_ready(watcher)]
        return ", ".join(f"{watcher} ({self._last_word(watcher)})" for watcher in awaited)

    def summary(self) -> str:
        """The model that is served and by how many, in words."""
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

    def _last_word(self, watcher: str) -> str:
        presence = self._last.get(watcher)
        return "not heard of" if presence is None else described(presence)


def described(presence: Presence) -> str:
    """State and detail: "starting: loading weights"."""
    return f"{presence.state}: {presence.detail}" if presence.detail else presence.state


def _told(presence: Presence) -> tuple[str, str, str]:
    return presence.lease, presence.state, presence.detail


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
