"""Tells when a block that stands in the cache has really been written.

vLLM registers the hashes of the blocks that a step is about to fill when it *schedules* the step, up to a whole chunk
of a prefill ahead of the forward pass that writes them. Scheduled steps end in order, and when one has ended all its
writes, and those of the steps before it, are visible. So what stood in the cache when n steps had been scheduled is
written once n steps have ended.

Scheduling synchronously (vLLM on CPU), the engine's loop handles questions only between steps, and none is ever under
way. With asynchronous scheduling (the default on GPUs) there is always one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class StepFence:
    """Counts steps in and out. Pure."""

    def __init__(self) -> None:
        self.scheduled = 0
        self.ended = 0
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()

    def schedule(self) -> None:
        """Note that one more step is on its way."""
        self.scheduled += 1

    def end(self) -> None:
        """Note that the first of the steps on their way has ended."""
        assert self.ended < self.scheduled, "a step ended that was not scheduled"
        self.ended += 1
        while self._waiting and self._waiting[0][0] <= self.ended:
            self._waiting.popleft()[1]()

    def when_written(self, do: Callable[[], None]) -> None:
        """Call once all steps scheduled up to now have ended: at once if none is on its way."""
        if self.ended == self.scheduled:
            do()
        else:
            self._waiting.append((self.scheduled, do))
