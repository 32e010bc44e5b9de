"""Takes the asynchronous tasks of a server. Of several frontends, one has a task in hand at a time; another one takes
it when that one has ended."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from components.frontend.async_tasks.running import Outcome, RunningTask, Surroundings, Tries
from components.frontend.http.models import Tasks
from components.frontend.http.own_requests import backoff_s
from dynamo_local.core.async_tasks.callbacks import AT_ONCE, AT_ONCE_FOR_ORIGIN, target_of
from dynamo_local.core.async_tasks.records import TaskHead
from dynamo_local.core.errors import DecodeError, ItemAbsentError, StateError
from dynamo_local.log_once import LogOnce
from dynamo_local.tasks import finish_in_thread, take_in_thread
from state.async_tasks.store import TakenTask, TaskStore

_log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
"""Between two looks for tasks that others have stored, left or cancelled."""

_REMOVE_EVERY_S = 60.0
_ELSEWHERE_S = 1.0
"""Before a task that another frontend has is tried again."""

_AGAIN_S = 5.0
"""Before a task whose journal cannot be written is tried again."""

_READ_AT_ONCE = 200


@dataclass
class _InHand:
    """A task in hand. `place`: that it was taken from. `cancelled`: set when nobody wants the result any more."""

    place: Place
    task: asyncio.Task[Outcome]
    cancelled: asyncio.Event


class TaskKeeper:
    """Brings tasks to their end, as far as this frontend has them. `why_closed`: why none are taken."""

    def __init__(self, store: TaskStore, around: Surroundings) -> None:
        self.why_closed = "the frontend is starting"
        self._store = store
        self._around = around
        self._known: dict[str, KnownTask] = {}
        self._models = defaultdict[str, WaitingTasks](WaitingTasks)
        self._calls = WaitingCalls()
        self._in_hand: dict[str, _InHand] = {}
        self._changed = asyncio.Event()
        self._log_once = LogOnce(_log)
        self._remove_at = 0.0
        self._stopping = False

    async def run(self) -> None:
        """Look for tasks again and again, until cancelled."""
        try:
            await asyncio.to_thread(self._store.check)
        except StateError as error:
            self.why_closed = str(error)
            _log.error("no asynchronous tasks are taken: %s", error)
            return
        self.why_closed = ""
        try:
            while not self._stopping:
                try:
                    await self._look()
                    await self._sweep()
                    self._log_once.clear()
                except StateError as error:
                    self._log_once.warn(f"asynchronous tasks wait: {error}")
                self._fill()
                self._changed.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_EVERY_S):
                        await self._changed.wait()
        finally:
            await self.stop()

    async def stop(self) -> None:
        """Leave all tasks to others, at once: what is recorded stays."""
        self._stopping = True
        running = [each.task for each in self._in_hand.values()]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)

    def note_new(self, owner: str, head: TaskHead) -> None:
        """Note a task that was just stored, so that it need not be looked for."""
        self._learn(KnownTask(owner, head.task, head.model))
        self._fill_model(head.model)
        self._around.on_taken()

    def look_soon(self) -> None:
        """Look at once: something was cancelled."""
        self._changed.set()

    @property
    def in_hand(self) -> int:
        """How many tasks this frontend has in hand."""
        return len(self._in_hand)

    def tasks(self) -> dict[str, Tasks]:
        """Return how many tasks without a result there are, by model."""
        return {model: Tasks(len(tasks), tasks.in_hand) for model, tasks in self._models.items()}

    # Looking

    async def _look(self) -> None:
        running, cancelled = await finish_in_thread(self._store.look)
        await self._read([each for each in running if each[1] not in self._known])
        there = {task for _, task in running}
        for task, known in list(self._known.items()):
            if task not in there and task not in self._in_hand:
                del self._known[task]
                self._line(known.place).discard(known)
        for task in cancelled & self._known.keys():
            if task in self._in_hand:
                self._in_hand[task].cancelled.set()
            else:
                # However many are in hand: it takes no room.
                known = self._known[task]
                self._line(known.place).take(known)
                self._begin(known, is_cancelled=True)

    async def _read(self, found: list[tuple[str, str]]) -> None:
        """Learn which models tasks are for that others have stored."""
        for begin in range(0, len(found), _READ_AT_ONCE):
            part = found[begin : begin + _READ_AT_ONCE]
            for known in await finish_in_thread(lambda part=part: [self._known_task(*each) for each in part]):  # type: ignore[misc]
                if known is not None:
                    self._learn(known)

    def _known_task(self, owner: str, task: str) -> KnownTask | None:
        try:
            found = self._store.find(owner, task)
            if found.result is None:
                return KnownTask(owner, task, found.head.model)
            left = self._around.left_s(found.calls)
            return KnownTask(owner, task, found.head.model, _receiver(found.head), time.monotonic() + left)
        except ItemAbsentError:
            return None
        except DecodeError:
            # Whoever takes it ends it.
            return KnownTask(owner, task, "")

    def _learn(self, known: KnownTask) -> None:
        if known.task not in self._known:
            self._known[known.task] = known
            self._line(known.place).add(known, time.monotonic())

    def _line(self, place: Place) -> WaitingTasks | WaitingCalls:
        return self._calls if place.receiver else self._models[place.model]

    async def _sweep(self) -> None:
        if time.monotonic() >= self._remove_at:
            self._remove_at = time.monotonic() + _REMOVE_EVERY_S
            await finish_in_thread(lambda: self._store.remove_expired(self._around.wall_clock()))

    # Taking

    def _fill(self) -> None:
        """Take tasks, as many as there is room for."""
        models = list(self._models)
        for model in models:
            self._fill_model(model)
        if models:
            self._around.on_taken()
        self._fill_calls()

    def _fill_model(self, model: str) -> None:
        if (waiting := self._models.get(model)) is None:
            return
        now, most = time.monotonic(), self._most(model)
        while not self._stopping and waiting.in_hand < most and (known := waiting.pop(now)) is not None:
            self._begin(known)
        if not len(waiting) and not waiting.in_hand:
            del self._models[model]

    def _fill_calls(self) -> None:
        now = time.monotonic()
        while not self._stopping and (known := self._calls.pop(now)) is not None:
            self._begin(known)

    def _most(self, model: str) -> int:
        return max(1, self._around.room(model, self._around.limits.max_task_requests))

    def _begin(self, known: KnownTask, *, is_cancelled: bool = False) -> None:
        cancelled = asyncio.Event()
        if is_cancelled:
            cancelled.set()
        task = asyncio.create_task(self._work(known, cancelled), name=known.task)
        self._in_hand[known.task] = _InHand(known.place, task, cancelled)
        task.add_done_callback(lambda done: self._put_down(known, done))

    def _put_down(self, known: KnownTask, done: asyncio.Task[Outcome]) -> None:
        now, place = time.monotonic(), self._in_hand.pop(known.task).place
        stays = known.task in self._known
        if stays:
            # It has not ended here. Added before it is counted no more: what is known of its line is not to be lost.
            self._line(known.place).add(known, now)
        self._line(place).put_down(place, Outcome.OTHER if done.cancelled() else done.result(), now)
        if not place.receiver:
            self._fill_model(place.model)
            self._around.on_taken()
        if place.receiver or (stays and known.receiver):
            self._fill_calls()

    async def _work(self, known: KnownTask, cancelled: asyncio.Event) -> Outcome:
        """Go on with a task, if nobody else has it."""
        taken: TakenTask | None = None
        try:
            taken = await take_in_thread(lambda: self._store.take(known.owner, known.task), TakenTask.release)
            if taken is not None:
                return await self._run(known, taken, cancelled)
            known.again_at = time.monotonic() + _ELSEWHERE_S
        except StateError as error:
            _log.warning("%s goes on later: %s", known.task, error)
            known.again_at = time.monotonic() + _AGAIN_S
        except Exception:  # noqa: BLE001
            # The boundary of a task: what is wrong with one must not end the process, and so all requests.
            _log.exception("%s goes on later", known.task)
            known.again_at = time.monotonic() + _AGAIN_S
        finally:
            if taken is not None:
                taken.release()
        return Outcome.OTHER

    async def _run(self, known: KnownTask, taken: TakenTask, cancelled: asyncio.Event) -> Outcome:
        running = RunningTask(taken, self._around, known.tries, cancelled)
        try:
            rest = await running.run(may_call=known.receiver != "")
        except DecodeError as error:
            _log.error("%s cannot go on: %s", known.task, error)
            await finish_in_thread(taken.end)
            rest = None
        if rest is None:
            self._known.pop(known.task, None)
            return running.outcome
        known.again_at = time.monotonic() + rest.pause_s
        if rest.answered is not None:
            known.receiver = _receiver(rest.answered)
        return running.outcome


def _receiver(head: TaskHead) -> str:
    """Return the origin of who is to be called; empty: nobody."""
    return target_of(head.callback_url).origin if head.callback_url else ""


# Tasks whose receivers are to be called: owners take turns, and so do the receivers of each.


class WaitingCalls:
    """Tasks that have their result. However many receivers there are, a step costs what those in hand cost."""

    def __init__(self) -> None:
        self._in_hand = Counter[str]()
        """By receiver."""
        self._ready: dict[str, dict[str, dict[str, KnownTask]]] = {}
        """By owner and receiver."""
        self._later = Later()

    def add(self, known: KnownTask, now: float) -> None:
        """Add a task; one that is there stays where it is."""
        if known.task in self._later:
            return
        if known.again_at > now and not self._is_ready(known):
            self._later.add(known)
        else:
            self._add_ready(known)

    def discard(self, known: KnownTask) -> None:
        """Remove a task, if it is there."""
        self._later.discard(known)
        if self._is_ready(known):
            self._remove_ready(known)

    def pop(self, now: float) -> KnownTask | None:
        """Take in hand a task whose receiver may be called now."""
        for known in self._later.due(now):
            self._add_ready(known)
        if self._in_hand.total() >= AT_ONCE:
            return None
        for owner, receivers in self._ready.items():
            free = (name for name in receivers if self._in_hand[name] < AT_ONCE_FOR_ORIGIN)
            if (receiver := next(free, None)) is not None:
                found = next(iter(receivers[receiver].values()))
                self.take(found)
                self._move_behind(owner, receiver)
                return found
        return None

    def take(self, known: KnownTask) -> None:
        """Take this task in hand, whoever's turn it is."""
        self.discard(known)
        self._in_hand[known.receiver] += 1

    def put_down(self, place: Place, outcome: Outcome, now: float) -> None:
        """Count a task that was taken from there as in hand no more."""
        self._in_hand[place.receiver] -= 1
        if not self._in_hand[place.receiver]:
            del self._in_hand[place.receiver]

    def _is_ready(self, known: KnownTask) -> bool:
        return known.task in self._ready.get(known.owner, {}).get(known.receiver, {})

    def _add_ready(self, known: KnownTask) -> None:
        self._ready.setdefault(known.owner, {}).setdefault(known.receiver, {}).setdefault(known.task, known)

    def _remove_ready(self, known: KnownTask) -> None:
        receivers = self._ready[known.owner]
        del receivers[known.receiver][known.task]
        if not receivers[known.receiver]:
            del receivers[known.receiver]
            if not receivers:
                del self._ready[known.owner]

    def _move_behind(self, owner: str, receiver: str) -> None:
        """Give others of the owner their turn, and other owners."""
        if (receivers := self._ready.get(owner)) is not None:
            self._ready[owner] = self._ready.pop(owner)
            if (tasks := receivers.pop(receiver, None)) is not None:
                receivers[receiver] = tasks


# Tasks that wait for their model to answer: owners take turns, those of an owner go in their order.

_MOST_REFUSALS, _REFUSALS_IN_VAIN = 256, 16
"""Refusals (429) of a line after which it waits: since it was last known to have room, and each time that it is tried
whether it has some again."""


class Place(NamedTuple):
    """Where a task waits: with those of its owner, for the model or, if there is one, for the receiver."""

    owner: str
    model: str
    receiver: str


@dataclass
class KnownTask:
    """A task that has not ended. `receiver`: the origin of who is to be called, when there is a result; empty before.
    `again_at`: it is not taken before (CLOCK_MONOTONIC, s). `tries`: that gave no result."""

    owner: str
    task: str
    model: str
    receiver: str = ""
    again_at: float = 0.0
    tries: Tries = field(default_factory=Tries)

    @property
    def place(self) -> Place:
        return Place(self.owner, self.model, self.receiver)


class WaitingTasks:
    """A line for each owner, for one model, and how many of it are in hand. `in_hand`: of all owners."""

    def __init__(self) -> None:
        self.in_hand = 0
        self._owners = defaultdict[str, _OwnersTasks](_OwnersTasks)

    def __len__(self) -> int:
        return sum(map(len, self._owners.values()))

    def add(self, known: KnownTask, now: float) -> None:
        """Add a task at the end of its owner's line; one that is there stays where it is."""
        self._owners[known.owner].add(known, now)

    def discard(self, known: KnownTask) -> None:
        """Remove a task, if it is there."""
        self._owners[known.owner].discard(known)
        self._tidy(known.owner)

    def pop(self, now: float) -> KnownTask | None:
        """Take in hand the first task, of the owner whose turn it is, that may be taken now."""
        for owner, line in self._owners.items():
            found = line.pop(now)
            if found is not None:
                self.in_hand += 1
                # The last one now.
                self._owners[owner] = self._owners.pop(owner)
                return found
        return None

    def take(self, known: KnownTask) -> None:
        """Take this task in hand, whoever's turn it is."""
        self.in_hand += 1
        line = self._owners[known.owner]
        line.discard(known)
        line.in_hand += 1

    def put_down(self, place: Place, outcome: Outcome, now: float) -> None:
        """Count a task that was taken from there as in hand no more."""
        self.in_hand -= 1
        self._owners[place.owner].put_down(outcome, now)
        self._tidy(place.owner)

    def _tidy(self, owner: str) -> None:
        line = self._owners[owner]
        if not len(line) and not line.in_hand:
            del self._owners[owner]


class Later:
    """Tasks that may not be taken yet."""

    def __init__(self) -> None:
        self._tasks: dict[str, KnownTask] = {}
        self._due: list[tuple[float, int, KnownTask]] = []
        """When they may be taken, the first one first. Those that were removed meanwhile stay here."""
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._tasks)

    def __contains__(self, task: str) -> bool:
        return task in self._tasks

    def add(self, known: KnownTask) -> None:
        """Add a task."""
        self._tasks[known.task] = known
        heapq.heappush(self._due, (known.again_at, next(self._numbers), known))

    def discard(self, known: KnownTask) -> None:
        """Remove a task, if it is there."""
        self._tasks.pop(known.task, None)

    def due(self, now: float) -> Iterator[KnownTask]:
        """Remove those that may be taken now, and give them."""
        while self._due and self._due[0][0] <= now:
            known = heapq.heappop(self._due)[2]
            if self._tasks.get(known.task) is known and known.again_at <= now:
                yield self._tasks.pop(known.task)


class _OwnersTasks:
    """The tasks of an owner in one line.

    A result shows that there is room: it makes place for its successor and one more. A refusal (429) tells of its task
    alone, which goes behind the others, and its place is lost: so what is refused for itself holds up nobody, and where
    all are refused, the places end, at the latest when each was tried. Where the model is closed, all are lost at once.
    When none are left, because tasks take long or none is in hand, some more are tried from time to time, ever less
    often while there are refusals. So 10,000 tasks that have to wait cost a try or two for each result.
    """

    def __init__(self) -> None:
        self.in_hand = 0
        self._ready: dict[str, KnownTask] = {}
        self._later = Later()
        self._answered_at = 0.0
        self._most = sys.maxsize
        """Places: for those in hand, and for those that may be refused."""
        self._try_more_at = 0.0
        self._refusals = 0
        """Periods with a refusal, one after the other."""
        self._has_refused = False
        """Whether there was one in this period."""

    def __len__(self) -> int:
        return len(self._ready) + len(self._later)

    def add(self, known: KnownTask, now: float) -> None:
        if known.task in self._ready or known.task in self._later:
            return
        if known.again_at <= now:
            self._ready[known.task] = known
        else:
            self._later.add(known)

    def discard(self, known: KnownTask) -> None:
        self._ready.pop(known.task, None)
        self._later.discard(known)

    def pop(self, now: float) -> KnownTask | None:
        self._ready.update((known.task, known) for known in self._later.due(now))
        if not self._ready or not self._has_room(now):
            return None
        self.in_hand += 1
        found = self._ready.pop(next(iter(self._ready)))
        found.tries.note_room(self._answered_at)
        return found

    def put_down(self, outcome: Outcome, now: float) -> None:
        self.in_hand -= 1
        if outcome is Outcome.ANSWERED:
            self._answered_at = now
            if self._most < sys.maxsize:
                self._most = min(self._most + 1, self.in_hand + _MOST_REFUSALS)
        elif outcome is Outcome.REFUSED:
            # It is there again itself.
            others = max(0, len(self) - 1)
            self._most = min(self._most - 1, self.in_hand + min(others, _MOST_REFUSALS))
        elif outcome is Outcome.CLOSED:
            self._most = min(self._most, self.in_hand)
        if outcome in (Outcome.REFUSED, Outcome.CLOSED) and not self._has_refused:
            self._has_refused = True
            self._refusals += 1
            self._try_more_at = now + backoff_s(self._refusals)

    def _has_room(self, now: float) -> bool:
        if self.in_hand < self._most:
            return True
        if now < self._try_more_at:
            return False
        if not self._has_refused:
            self._refusals = 0
        self._has_refused = False
        self._most = max(self.in_hand + _REFUSALS_IN_VAIN, 2 * self._most)
        # Without a refusal until then, there is more room than is known.
        self._try_more_at = now + backoff_s(0)
        return True
