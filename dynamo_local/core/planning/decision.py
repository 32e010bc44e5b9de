"""What was decided at the end of an adjustment interval, and why. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dynamo_local.core.planning.actions import AddWorker, Change, RemoveWorker, Restart, SwitchRole


@dataclass(frozen=True)
class Verdict:
    """What was decided for one role. `reason` is a sentence with its numbers; `figures` are the same by name, None
    where something is unknown."""

    role: str
    wanted: int
    """By the policy alone: 1 one more worker, -1 one less, 0 neither."""
    reason: str
    figures: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Decision:
    """`at` is CLOCK_MONOTONIC, in seconds. `devices` are held by all workers together, before the changes, of at most
    `max_devices`."""

    at: float
    policy: str
    verdicts: tuple[Verdict, ...]
    changes: tuple[Change, ...]
    devices: int | None
    max_devices: int

    @property
    def text(self) -> str:
        """The decision in one line."""
        done = ", ".join(map(describe, self.changes)) or "no change"
        return f"{done} ({'; '.join(f'{verdict.role}: {verdict.reason}' for verdict in self.verdicts)})"


def describe(change: Change) -> str:
    """A change in words."""
    match change:
        case AddWorker(role=role):
            article = "an" if role[0] in "aeiou" else "a"
            return f"add {article} {role} worker"
        case RemoveWorker(watcher=watcher):
            return f"remove {watcher}"
        case SwitchRole(watcher=watcher, to=to):
            return f"turn {watcher} to {to}"
        case Restart(watcher=watcher):
            return f"restart {watcher}"
