"""The class of a request, by its priority. Pure.

Where requests wait or are given up, classes are told apart. Within a class the lower number is served first.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from hashlib import blake2b
from typing import Protocol

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


# How much of a bound is taken, by class and key, and who may still come. Pure.
#
# A bound counts a class and those above it (classes.py). As long as there is room anybody may come, so a key alone gets
# everything. When there is none, a key that has less than its share of the bound may come still, up to twice the bound
# in all: so one key cannot keep the others out, and what others have beyond their shares need not be taken from them.

BEYOND = 2
"""Times the bound, up to which keys that have less than their share may come."""

MARK_BYTES = 8


@lru_cache(maxsize=4096)
def mark_of(key: str) -> bytes:
    """Return by what keys are told apart where they are counted: MARK_BYTES bytes, the same in all processes."""
    return blake2b(key.encode(), digest_size=MARK_BYTES).digest()


class Taken(Protocol):
    """A part of a bound that is taken."""

    def ahead(self, one: PriorityClass) -> int:
        """What counts against a bound of this class: its own, and that of higher classes."""

    def by_key(self, one: PriorityClass) -> Counter[bytes]:
        """The same by key (`mark_of`), as far as it is known whose it is; keys that have nothing are left out."""


class Occupancy:
    """What is under way, by class and key, in whatever unit the bound has."""

    def __init__(self) -> None:
        self._by_class: dict[PriorityClass, dict[bytes, int]] = {one: {} for one in PriorityClass}
        self._total = dict.fromkeys(PriorityClass, 0)

    def add(self, priority: int, key: str, number: int) -> None:
        """Count so much more; negative: less."""
        one, mark = class_of(priority), mark_of(key)
        self._total[one] += number
        keys = self._by_class[one]
        if (left := keys.get(mark, 0) + number) > 0:
            keys[mark] = left
        else:
            keys.pop(mark, None)

    @property
    def total(self) -> int:
        return sum(self._total.values())

    def of(self, one: PriorityClass) -> int:
        """What is under way of this class."""
        return self._total[one]

    def ahead(self, one: PriorityClass) -> int:
        """As in Taken."""
        return sum(map(self._total.__getitem__, ahead_of(one)))

    def by_key(self, one: PriorityClass) -> Counter[bytes]:
        """As in Taken."""
        found: Counter[bytes] = Counter()
        for each in ahead_of(one):
            found.update(self._by_class[each])
        return found


@dataclass(frozen=True)
class Share:
    """How a key stands that finds no room. `has`: what it has already, of `share`."""

    has: int
    share: int
    keys: int
    """Number of keys that have something, itself included."""


def share_of(key: str, one: PriorityClass, bound: int, *taken: Taken) -> Share:
    """Return a key's share of a bound, of which these parts are taken."""
    by_key = sum((part.by_key(one) for part in taken), Counter[bytes]())
    keys = len(by_key.keys() | {mark_of(key)})
    return Share(by_key[mark_of(key)], max(bound // keys, 1), keys)


def may_come(asked: int, key: str, one: PriorityClass, bound: int, *taken: Taken) -> bool:
    """Whether so much more may come of this class and key."""
    total = asked + sum(part.ahead(one) for part in taken)
    if total <= bound:
        return True
    if total > BEYOND * bound:
        return False
    share = share_of(key, one, bound, *taken)
    return share.keys > 1 and share.has + asked <= share.share
