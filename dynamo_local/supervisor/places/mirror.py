"""Mirrors lease and role of far processes, which write them to their node's statefile, into the graph's books."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress

import msgspec

from dynamo_local.core.errors import NotRunningError, StateError
from dynamo_local.core.fleet.view import Change, Happened
from dynamo_local.core.messages.presence import Presence
from dynamo_local.supervisor.places.books import Books
from state.statefile.model import State

_AT_LEAST_EVERY_S = 1.0
"""A claim may follow the presence of its process."""


def mirrored(state: State, members: Iterable[Presence]) -> State:
    """The state with lease and role of each process of another node as its presence tells them; without a lease if
    there is no presence. Pure."""
    heard = {presence.watcher: presence for presence in members}
    components = dict(state.components)
    for name, entry in state.components.items():
        if entry.node == state.node or not entry.holds or entry.phase == "reserved":
            continue
        presence = heard.get(name)
        lease, role = (None, entry.role) if presence is None else (presence.lease, presence.role)
        components[name] = msgspec.structs.replace(entry, lease=lease, role=role)
    return state if components == state.components else msgspec.structs.replace(state, components=components)


class PresenceMirror:
    """Keeps the books in line with the presences on the bus. `members`: those that there are."""

    def __init__(self, books: Books, members: Callable[[], list[Presence]]) -> None:
        self._books = books
        self._members = members
        self._known: dict[str, tuple[str, str]] = {}
        self._changed = asyncio.Event()

    def on_change(self, change: Change) -> None:
        """Note a change of the fleet."""
        presence = change.presence
        now = None if change.what is Happened.LEFT else (presence.lease, presence.role)
        if self._known.get(presence.watcher) != now:
            if now is None:
                del self._known[presence.watcher]
            else:
                self._known[presence.watcher] = now
            self._changed.set()

    async def run(self) -> None:
        """Write changes down until cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_AT_LEAST_EVERY_S):
                    await self._changed.wait()
            self._changed.clear()
            # The server repairs its statefile, and reports it (upkeep/files.py).
            with suppress(NotRunningError, StateError):
                await self.write()

    async def write(self) -> None:
        """Write down what is heard now."""
        members = self._members()
        state = await self._books.read()
        if mirrored(state, members) != state:
            await self._books.update(lambda state: mirrored(state, members))
