"""Events in virtual time: a heap of times."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class Agenda:
    """What is to happen, and when, in seconds. Of equal times, `late` actions come last, else the first entered."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, bool, int, Action]] = []
        self._entered = 0

    def at(self, when: float, action: Action, *, late: bool = False) -> None:
        """Enter an action. `when` is not before now."""
        assert when >= self.now, f"{when} is before {self.now}"
        self._entered += 1
        heapq.heappush(self._heap, (when, late, self._entered, action))

    def after(self, delay_s: float, action: Action) -> None:
        """Do it once that time has passed: at once, if it is 0."""
        if delay_s > 0:
            self.at(self.now + delay_s, action)
        else:
            action()

    @property
    def is_empty(self) -> bool:
        return not self._heap

    def run(self) -> None:
        """Do everything that was entered, and what that enters, in order."""
        while self._heap:
            self.now, _, _, action = heapq.heappop(self._heap)
            action()
