"""The registries of a running server: what is ordered, in memory and on disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from dynamo_local.core.endpoints.registry import Registry
from dynamo_local.supervisor.server.reports.report import Report
from dynamo_local.tasks import finish_in_thread
from state.documents import DocumentStore

_T = TypeVar("_T")


@dataclass
class KeptDocument(Generic[_T]):
    """A registry of one server. `current`: everything that is ordered. One change at a time; what is not on disk is not
    ordered."""

    store: DocumentStore[_T]
    current: _T
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    @classmethod
    async def open(cls, store: DocumentStore[_T], report: Report) -> KeptDocument[_T]:
        """What the store has. What had to be put in order for that is reported. Raises StateError."""
        found, notes = await asyncio.to_thread(store.open)
        for note in notes:
            report.step(note)
        return cls(store, found)

    async def change(self, change: Callable[[_T], _T]) -> _T:
        """Replace the registry by `change(registry)`, on disk first. Raises what `change` raises, and DiskError."""
        async with self._lock:
            after = change(self.current)
            if after != self.current:
                # At the end of the server, the file is whole before the server's lock is free.
                await finish_in_thread(lambda: self.store.write(after))
                self.current = after
            return after


KeptRegistry = KeptDocument[Registry]
"""The registry of endpoints of one server."""
