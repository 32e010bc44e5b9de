"""How a request's output depends on state that is lost with its worker. Pure. Which sampling parameter means what is
decided by each engine."""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass


class Fidelity(enum.IntEnum):
    """What becomes of the output when a request is continued from its log on another worker, best first."""

    EXACT = 0
    """The same tokens follow as without the loss."""
    DISTRIBUTION = 1
    """Tokens from the same distribution follow. The client did not ask for reproducible ones."""
    NONE = 2
    """The tokens that follow would depend on state that was lost with the worker. The request is not continued."""


@dataclass(frozen=True)
class Survival:
    """The fidelity of a request, and the sampling parameter that decides it (`because_of`). `rebuilt` names parameters
    whose state the next engine must rebuild from the log for that fidelity."""

    fidelity: Fidelity = Fidelity.EXACT
    because_of: str | None = None
    rebuilt: tuple[str, ...] = ()

    def without(self, forgotten: Collection[str]) -> Survival:
        """Return the survival among engines that cannot rebuild the state of these parameters."""
        lost = next((name for name in self.rebuilt if name in forgotten), None)
        if lost is None or self.fidelity is Fidelity.NONE:
            return self
        return Survival(Fidelity.NONE, lost, self.rebuilt)


LOST = Survival(Fidelity.NONE)
