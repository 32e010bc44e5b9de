"""Tells what is queued for each model beside its requests, so that its workers scale on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from components.frontend.http.models import ModelEntry, ModelTable

TELL_EVERY_S = 0.5


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
