"""Tells what is queued for each model beside its requests, so that its workers scale on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from components.frontend.batches.pacing import room_of
from components.frontend.http.models import ModelEntry, ModelTable

TELL_EVERY_S = 0.5


_WAKING = 8
"""Requests in flight for a model without a ready worker: one would do to wake it."""


def room_for_tasks(models: ModelTable, name: str) -> int:
    """Return how many tasks may be in flight for a model."""
    entry = models.find(name)
    if not isinstance(entry, ModelEntry):
        return _WAKING
    room = room_of(entry)
    return room.slots if room.workers else _WAKING


class QueuedWork:
    """`waiting` returns how many requests of the server are queued, by the name by which they ask for a model."""

    def __init__(self, models: ModelTable, waiting: Callable[[], Mapping[str, int]]) -> None:
        self._models = models
        self._waiting = waiting

    async def run(self) -> None:
        """Tell it now and again, until cancelled."""
        while True:
            self.tell()
            await asyncio.sleep(TELL_EVERY_S)

    def tell(self) -> None:
        """Note it at the models for which it has changed."""
        queued: dict[int, int] = {}
        for name, number in self._waiting().items():
            entry = self._models.find(name)
            if isinstance(entry, ModelEntry):
                queued[id(entry)] = queued.get(id(entry), 0) + number
        for entry in self._models.entries:
            number = queued.get(id(entry), 0)
            if entry.queued != number:
                entry.queued = number
                entry.on_change()
