"""The decision at the end of an adjustment interval: its actions and its reasons. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dynamo_local.core.planning.actions import Action, AddWorker, RemoveWorker, Restart, SwitchRole


@dataclass(frozen=True)
class Verdict:
    """The result for one role. `reason` is a sentence with numbers; `figures` gives the same numbers by name (None:
    unknown)."""

    role: str
    wanted: int
    """1: one more worker, -1: one less, 0: neither."""
    reason: str
    figures: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Decision:
    """The verdicts of all roles and the actions that follow. `at` is CLOCK_MONOTONIC, in seconds. `devices`: held by
    all workers together before the actions (None: unknown), of at most `max_devices`."""

    at: float
    policy: str
    verdicts: tuple[Verdict, ...]
    actions: tuple[Action, ...]
    devices: int | None
    max_devices: int

    @property
    def text(self) -> str:
        """Actions and reasons in one line."""
        actions = ", ".join(map(describe, self.actions)) or "no action"
        return f"{actions} ({'; '.join(f'{verdict.role}: {verdict.reason}' for verdict in self.verdicts)})"


def describe(action: Action) -> str:
    """Return the action in words."""
    match action:
        case AddWorker(role=role):
            article = "an" if role[0] in "aeiou" else "a"
            return f"add {article} {role} worker"
        case RemoveWorker(watcher=watcher):
            return f"remove {watcher}"
        case SwitchRole(watcher=watcher, to=to):
            return f"switch {watcher} to {to}"
        case Restart(watcher=watcher):
            return f"restart {watcher}"
