"""The steps by which an endpoint comes to what is ordered of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """Get and check the model of the revision, and write its files."""

    revision: int


@dataclass(frozen=True)
class Start:
    """Start so many workers of the revision, side by side."""

    revision: int
    workers: int
    prefill_workers: int = 0


@dataclass(frozen=True)
class Park:
    """Park these workers of the revision, side by side."""

    revision: int
    watchers: tuple[str, ...]


@dataclass(frozen=True)
class Wake:
    """Have these parked workers of the revision take requests again, side by side."""

    revision: int
    watchers: tuple[str, ...]


@dataclass(frozen=True)
class BreakOff:
    """Break off the start under way: end the workers of the revision that are starting."""

    revision: int


@dataclass(frozen=True)
class Retire:
    """End these workers of the revision in order."""

    revision: int
    watchers: tuple[str, ...]


@dataclass(frozen=True)
class End:
    """End all workers of the revision, starting ones included, and remove its files."""

    revision: int


@dataclass(frozen=True)
class Settle:
    """Forget the previous revision: there is no going back to it."""


@dataclass(frozen=True)
class Revert:
    """Order the previous revision again."""

    why: str


@dataclass(frozen=True)
class Forget:
    """Remove the endpoint: nothing is left of it."""


RevisionStep = Launch | Start | Park | Wake | BreakOff | Retire | End
"""Steps that a revision carries out by itself, in the background."""


Step = RevisionStep | Settle | Revert | Forget


@dataclass(frozen=True)
class Plan:
    """Steps to begin now, and what the board is to list: all these revisions, of which `takes` takes new requests."""

    steps: tuple[Step, ...] = ()
    listed: tuple[int, ...] = ()
    takes: int | None = None
