"""Which class of waiting requests gets the next slot: the highest, but none waits for ever. Pure."""

from __future__ import annotations

from dynamo_local.core.priority.classes import PriorityClass

LEAST_SHARE = 0.05
"""Share of the slots that each class gets at least while it waits."""

# Two classes may be due at the same time, so each is due one slot early.
_DUE_AFTER = round(1 / LEAST_SHARE) - 2


class Turns:
    """Turns of the classes at slots that become free one after another."""

    def __init__(self) -> None:
        self._passed = dict.fromkeys(PriorityClass, 0)
        """Slots that others got since the class had its last turn, or was found empty."""

    def order(self) -> tuple[PriorityClass, ...]:
        """Return the order in which classes are asked for the next slot: those that are due, then the highest."""
        due = [one for one in PriorityClass if self.is_due(one)]
        due.sort(key=lambda one: -self._passed[one])
        return (*due, *(one for one in PriorityClass if one not in due))

    def row(self, chosen: PriorityClass) -> int:
        """Return how many slots the class may get in a row before another one's turn; at least 1."""
        if self.is_due(chosen):
            return 1
        return max(1, _DUE_AFTER - max(self._passed[one] for one in PriorityClass if one is not chosen))

    def served(self, chosen: PriorityClass, slots: int = 1) -> int:
        """Note that the class got so many slots. Return how many others had got since its last turn."""
        before = self._passed[chosen]
        for one in PriorityClass:
            self._passed[one] = 0 if one is chosen else self._passed[one] + slots
        return before

    def not_served(self, chosen: PriorityClass, before: int) -> None:
        """Note that the class could not use the slot that it was given last. `before`: what `served` returned then."""
        for one in PriorityClass:
            self._passed[one] = before if one is chosen else max(self._passed[one] - 1, 0)

    def nobody(self, empty: PriorityClass) -> None:
        """Note that nobody of the class waits."""
        self._passed[empty] = 0

    def is_due(self, one: PriorityClass) -> bool:
        """Whether the next slot is this class's, whoever else waits."""
        return self._passed[one] >= _DUE_AFTER
