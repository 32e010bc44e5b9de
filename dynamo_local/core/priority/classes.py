"""The class of a request, by its priority. Pure.

Where requests wait or are given up, classes are told apart. Within a class the lower number is served first.
"""

from __future__ import annotations

from enum import StrEnum

MOST_PRIORITY = 2**31 - 1
"""Priorities are whole numbers from -MOST_PRIORITY to this."""


class PriorityClass(StrEnum):
    """Classes, in the order in which they are served."""

    HIGH = "high"
    """Priorities below 0."""
    NORMAL = "normal"
    """Priority 0, which is that of requests that name none."""
    BACKGROUND = "background"
    """Priorities above 0."""

    @property
    def rank(self) -> int:
        """Place in that order, from 0."""
        return len(_AHEAD[self]) - 1


def class_of(priority: int) -> PriorityClass:
    """Return the class of requests with this priority."""
    if priority < 0:
        return PriorityClass.HIGH
    return PriorityClass.NORMAL if priority == 0 else PriorityClass.BACKGROUND


def ahead_of(one: PriorityClass) -> tuple[PriorityClass, ...]:
    """Return the classes that are served before newcomers of this one: the higher ones, and itself."""
    return _AHEAD[one]


def lower_than(one: PriorityClass) -> int | None:
    """Return the lowest number of those priorities that are of lower classes. None: no class is lower."""
    return _LOWER[one]


_LOWER = {PriorityClass.HIGH: 0, PriorityClass.NORMAL: 1, PriorityClass.BACKGROUND: None}
_AHEAD = {one: tuple(PriorityClass)[: place + 1] for place, one in enumerate(PriorityClass)}
