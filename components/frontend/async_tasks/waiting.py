"""Tasks that wait for their model to answer: owners take turns, those of an owner go in their order."""

from __future__ import annotations

import heapq
import itertools
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from components.frontend.async_tasks.tries import Outcome, Tries
from components.frontend.http.own_requests import backoff_s

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
