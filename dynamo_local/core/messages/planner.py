"""What the planner tells everybody who listens. Frozen, versioned, msgpack (codec.py)."""

from __future__ import annotations

import msgspec

from dynamo_local.core.codec import VERSION


class RoleReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """A role's workers as the planner sees them. `usage`: mean KV usage of those that can be read, 0 to 1."""

    role: str
    routable: int
    starting: int = 0
    retiring: int = 0
    running: int | None = None
    waiting: int | None = None
    usage: float | None = None


class DecisionReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """A decision, and what became of its changes. `time` is Unix time, in seconds."""

    time: float
    text: str
    outcomes: tuple[str, ...] = ()


class PlannerReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """The planner tells what it sees, each time it has looked. None: it could not be read."""

    watcher: str
    """The planner's own; empty if it is no service of the graph."""
    policy: str
    acts: bool
    """False: it observes, and changes nothing."""
    at: float
    """CLOCK_MONOTONIC, in seconds."""
    roles: tuple[RoleReport, ...]
    devices: int | None
    max_devices: int
    queue_waiting: int | None = None
    queue_in_hand: int | None = None
    changing: str | None = None
    """The change that is under way. Meanwhile nothing is pulled."""
    decisions: tuple[DecisionReport, ...] = ()
    """The last ones, newest last."""
    v: int = VERSION
