"""How much of what is stored, lines of batches and asynchronous tasks, is in flight for each model of this frontend."""

from __future__ import annotations

import asyncio
import math
import sys
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from components.frontend.http.models import ModelEntry, ModelTable, Tasks
from dynamo_local.core.fleet.view import FRONTEND_ROLE, WORKER_ROLES
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.priority.classes import PriorityClass
from dynamo_local.core.stored.batches import BATCH_PRIORITY, Room, next_window

# Lines of batches.

TICK_S = 0.05
"""Between two looks at who else asks a model, in seconds."""

_PEOPLE = frozenset({PriorityClass.HIGH, PriorityClass.NORMAL})
_SLOTS = 64
"""Of an engine that does not tell how many requests it runs at the same time."""


class _Lane:
    """The lines of one model, which go in the order in which they come."""

    def __init__(self) -> None:
        self.window = 0
        self.in_flight = 0
        self._waiting: deque[tuple[asyncio.Future[None], bool]] = deque()

    async def enter(self, *, wakes: bool) -> None:
        """Wait until a line may be in flight, and count it. `wakes`: one may be whatever the window says."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, wakes))
        self.look()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave()
            raise

    def leave(self) -> None:
        """Count a line no more."""
        self.in_flight -= 1
        self.look()

    def look(self) -> None:
        """Let lines in, as many as there is room for."""
        while self._waiting and self.in_flight < max(self.window, int(self._waiting[0][1])):
            turn, _ = self._waiting.popleft()
            if not turn.done():
                self.in_flight += 1
                turn.set_result(None)


class Pacer:
    """Lets lines of batches through, as many as there is room for. `most`: in flight for each model."""

    def __init__(self, models: ModelTable, most: int) -> None:
        self._models = models
        self._most = most
        self._lanes: dict[ModelEntry, _Lane] = {}

    async def run(self) -> None:
        """Look who else asks, again and again, until cancelled."""
        while True:
            for entry in list(self._lanes):
                self._look(entry)
            await asyncio.sleep(TICK_S)

    @asynccontextmanager
    async def turn(self, entry: ModelEntry, *, wakes: bool) -> AsyncIterator[None]:
        """Wait until a line may be in flight for the model, which it is until the context ends. `wakes`: one may be
        where there is no worker. What is asked for may have become another model meanwhile."""
        lane = self._lanes.setdefault(entry, _Lane())
        await lane.enter(wakes=wakes)
        try:
            yield
        finally:
            lane.leave()

    def _look(self, entry: ModelEntry) -> None:
        lane = self._lanes[entry]
        if entry not in self._models.entries:
            # Lines that wait here look for their model again.
            del self._lanes[entry]
            lane.window = sys.maxsize
            lane.look()
            if entry.pauses is not None:
                # Its workers end when its requests have.
                entry.pauses.end()
            return
        room = room_of(entry)
        lane.window = next_window(lane.window, lane.in_flight, room, self._most)
        lane.look()
        if entry.pauses is None:
            return
        if room.people:
            entry.pauses.keep(lane.window, BATCH_PRIORITY)
        else:
            entry.pauses.end()


def room_of(entry: ModelEntry) -> Room:
    """Return a model as this frontend sees it now."""
    members = entry.members()
    workers = [each for each in members if each.role in WORKER_ROLES and each.state == "ready"]
    loads = [each.load for each in workers if each.load is not None]
    people = sum(part.ahead(PriorityClass.NORMAL) for part in entry.taken)
    frontends = sum(each.role == FRONTEND_ROLE for each in members)
    if frontends > 1:
        # What this frontend has itself it knows sooner; of the others' it knows what workers tell.
        people = max(people, sum(_people_at(each) for each in workers))
    return Room(
        workers=0 if entry.unready() is not None else len(workers),
        slots=sum(_SLOTS if each.engine is None else each.engine.max_num_seqs for each in workers),
        people=people,
        waiting=sum(load.waiting or 0 for load in loads),
        kv_usage=max((load.kv_usage or 0.0 for load in loads), default=0.0),
        frontends=frontends,
    )


def _people_at(worker: Presence) -> int:
    by_class = () if worker.load is None else worker.load.by_class or ()
    return sum(each.requests for each in by_class if each.priority_class in _PEOPLE)


# Asynchronous tasks and answers: told beside the requests of each model, so that its workers scale on them.

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
