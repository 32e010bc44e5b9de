"""What a new epoch does to a request's output. Pure words; which parameter means what is each engine's to say."""

from __future__ import annotations

import enum
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
    """How a request survives, and which parameter decides that."""

    fidelity: Fidelity = Fidelity.EXACT
    because_of: str | None = None


LOST = Survival(Fidelity.NONE)
