"""Tasks that wait to be taken, for one model or receiver: owners take turns, those of an owner go in their order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class Line(NamedTuple):
    """What tasks wait for: a model that is to answer, or a receiver that is to be called."""

    model: str
    receiver: str


@dataclass
class KnownTask:
    """A task that has not ended. `receiver`: the origin of who is to be called, when there is a result; empty before.
    `again_at`: it is not taken before (CLOCK_MONOTONIC, s)."""

    owner: str
    task: str
    model: str
    receiver: str = ""
    again_at: float = 0.0

    @property
    def line(self) -> Line:
        return Line(self.model, "") if not self.receiver else Line("", self.receiver)


class WaitingTasks:
    """A line for each owner."""

    def __init__(self) -> None:
        self._lines: dict[str, dict[str, KnownTask]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __iter__(self) -> Iterator[KnownTask]:
        return (each for line in self._lines.values() for each in line.values())

    def add(self, known: KnownTask) -> None:
        """Add a task at the end of its owner's line; one that is there stays where it is."""
        self._lines.setdefault(known.owner, {}).setdefault(known.task, known)

    def discard(self, known: KnownTask) -> None:
        """Remove a task, if it is there."""
        line = self._lines.get(known.owner, {})
        line.pop(known.task, None)
        if not line:
            self._lines.pop(known.owner, None)

    def pop(self, now: float) -> KnownTask | None:
        """Take the first task, of the owner whose turn it is, that may be taken now."""
        for owner, line in self._lines.items():
            found = next((each for each in line.values() if each.again_at <= now), None)
            if found is not None:
                self.discard(found)
                if line:
                    # The last one now.
                    self._lines[owner] = self._lines.pop(owner)
                return found
        return None
