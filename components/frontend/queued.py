"""Tells what tasks there are for each model beside its requests, so that its workers scale on them, and how many may be
in flight."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Mapping

from components.frontend.batches.pacing import room_of
from components.frontend.http.models import ModelEntry, ModelTable, Tasks

TELL_EVERY_S = 0.5

_WAKING = 8
"""Tasks in flight for a model without a ready worker: one wakes it, and all of them go to the first worker that is
ready."""

_MARGIN = 1.25
_LEAST_MARGIN = 2
"""Tasks that wait at the engines, so that none is idle from the end of a task until the next one comes."""


def room_for_tasks(models: ModelTable, name: str, most: int) -> int:
    """Return how many tasks this frontend may have in flight for a model, at most `most`: what its ready workers run at
    once, and a margin. More would stay with the workers that are ready first while others start."""
    entry = models.find(name)
    if not isinstance(entry, ModelEntry):
        return most
    room = room_of(entry)
    if not room.workers:
        return min(most, _WAKING)
    wanted = max(room.slots * _MARGIN, room.slots + _LEAST_MARGIN)
    return min(most, math.ceil(wanted / max(1, room.frontends)))


class QueuedWork:
    """`tasks` returns the tasks of the server by the name by which they ask for a model; `answers` how many answers
    wait in this frontend."""

    def __init__(
        self,
        models: ModelTable,
        tasks: Callable[[], Mapping[str, Tasks]],
        answers: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        self._models = models
        self._tasks = tasks
        self._answers = answers

    async def run(self) -> None:
        """Tell of them now and again, until cancelled."""
        while True:
            self.tell()
            await asyncio.sleep(TELL_EVERY_S)

    def tell(self) -> None:
        """Note them at the models for which they have changed."""
        found: dict[int, Tasks] = {}
        for name, tasks in self._tasks().items():
            entry = self._models.find(name)
            if isinstance(entry, ModelEntry):
                before = found.get(id(entry), Tasks())
                found[id(entry)] = Tasks(before.queued + tasks.queued, before.taken + tasks.taken)
        waiting = Counter[int]()
        for name, number in self._answers().items():
            waiting[id(self._models.find(name))] += number
        for entry in self._models.entries:
            tasks, answers = found.get(id(entry), Tasks()), waiting[id(entry)]
            if (entry.tasks, entry.waiting_answers) != (tasks, answers):
                entry.tasks, entry.waiting_answers = tasks, answers
                entry.on_change()
