"""Tasks whose receivers are to be called: owners take turns, and so do the receivers of each."""

from __future__ import annotations

from collections import Counter

from components.frontend.async_tasks.tries import Outcome
from components.frontend.async_tasks.waiting import KnownTask, Later, Place
from dynamo_local.core.async_tasks.callbacks import AT_ONCE, AT_ONCE_FOR_ORIGIN


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
