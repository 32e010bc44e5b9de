"""The statefile, read and updated beside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from dynamo_local.tasks import finish_in_thread
from state.statefile.model import State


class Statefile(Protocol):
    """The statefile (state.statefile.store.StateStore). Calls block for milliseconds."""

    def read(self) -> State: ...
    def update(self, change: Callable[[State], State]) -> State: ...


@dataclass(frozen=True)
class Books:
    """The statefile. Both methods raise NotRunningError once there is none, and StateError."""

    store: Statefile

    async def read(self) -> State:
        """Read the statefile."""
        return await asyncio.to_thread(self.store.read)

    async def update(self, change: Callable[[State], State]) -> State:
        """Update the statefile. Whoever is cancelled meanwhile waits for the end of the update: it is not to happen
        after the lock on changes is free."""
        return await finish_in_thread(lambda: self.store.update(change))
