"""What a new epoch does to a request's output. Pure words; which parameter means what is each engine's to say."""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass


class Fidelity(enum.IntEnum):
    """How a request survives being continued from its log on another worker, best first."""

    EXACT = 0
    """The very same tokens follow."""
    DISTRIBUTION = 1
    """Tokens follow that are drawn from the very same distribution; which ones was never promised."""
    NONE = 2
    """What follows would depend on state that died with the worker. Such a request is not continued."""


@dataclass(frozen=True)
class Survival:
    """How a request survives, and which parameter decides that. `rebuilt` are parameters whose state the next engine
    has to rebuild from the log for that."""

    fidelity: Fidelity = Fidelity.EXACT
    because_of: str | None = None
    rebuilt: tuple[str, ...] = ()

    def without(self, forgotten: Collection[str]) -> Survival:
        """What it comes to where the state of these parameters cannot be rebuilt."""
        lost = next((name for name in self.rebuilt if name in forgotten), None)
        if lost is None or self.fidelity is Fidelity.NONE:
            return self
        return Survival(Fidelity.NONE, lost, self.rebuilt)


LOST = Survival(Fidelity.NONE)
