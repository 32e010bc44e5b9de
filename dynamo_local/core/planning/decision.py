"""The decision at the end of an adjustment interval: its actions and its reasons. Plain data."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dynamo_local.core.messages.reports import Event
from dynamo_local.core.names import short_watcher
from dynamo_local.core.planning.actions import Action, ActionOutcome, AddWorker, RemoveWorker, Restart, SwitchRole
from dynamo_local.core.planning.window import Observation

_IN_PLACE = "in place of "
"""Begins the note of an outcome that names a replaced worker."""

_NUMBER = re.compile(r"\d+(?:\.\d+)?")


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
    all workers together before the actions (None: unknown), of at most `max_devices`. `acts`: whether the actions are
    applied; a planner that only observes would apply them."""

    at: float
    policy: str
    verdicts: tuple[Verdict, ...]
    actions: tuple[Action, ...]
    devices: float | None
    max_devices: int
    acts: bool = True

    @property
    def change(self) -> str:
        """The actions in words: "add a decode worker", or "would add a decode worker" if the planner only observes."""
        return ", ".join(self.described(action) for action in self.actions) or "no change"

    @property
    def reasons(self) -> str:
        """The reasons for each role in one line."""
        return "; ".join(f"{verdict.role}: {verdict.reason}" for verdict in self.verdicts)

    @property
    def text(self) -> str:
        """Actions and reasons in one line."""
        return f"{self.change} ({self.reasons})"

    @property
    def gist(self) -> tuple[str, ...]:
        """The decision without the numbers in its reasons, by which a repeated decision is recognised."""
        return self.change, *(f"{each.role} {each.wanted} {_NUMBER.sub('#', each.reason)}" for each in self.verdicts)

    def described(self, action: Action) -> str:
        """Return an action of this decision in words."""
        return describe(action) if self.acts else f"would {describe(action)}"


def describe(action: Action) -> str:
    """Return the action in words."""
    match action:
        case AddWorker(role=role):
            article = "an" if role[0] in "aeiou" else "a"
            return f"add {article} {role} worker"
        case RemoveWorker(watcher=watcher):
            return f"remove {short_watcher(watcher)}"
        case SwitchRole(watcher=watcher, to=to):
            return f"switch {short_watcher(watcher)} to {to}"
        case Restart(watcher=watcher):
            return f"restart {short_watcher(watcher)}"


def event_of(outcome: ActionOutcome, why: str) -> Event:
    """Return the event of an action that is over. `why`: the command that asked for it, or the planner's reasons."""
    done, watcher = _in_the_past(outcome.action)
    if outcome.done:
        replaced = outcome.note.removeprefix(_IN_PLACE)
        in_place = "" if replaced == outcome.note else f" {_IN_PLACE}{short_watcher(replaced)}"
        what = f"{done}{in_place} in {outcome.took_s:.1f} s"
    else:
        what = f"not {done}: {outcome.note}"
    return Event("scale", what, why, outcome.watcher or watcher)


def _in_the_past(action: Action) -> tuple[str, str]:
    """What was done once the action is over, and the watcher that it names."""
    match action:
        case AddWorker():
            return "added", ""
        case RemoveWorker(watcher=watcher):
            return "removed", watcher
        case SwitchRole(watcher=watcher, to=to):
            return f"switched to {to}", watcher
        case Restart(watcher=watcher):
            return "restarted", watcher


# The port to whatever shows the planner's observations and decisions: event files, metrics, a terminal.


class Recorder(Protocol):
    """Receives observations and decisions in order, from one caller. Calls return at once: slow writes belong in a
    thread of the recorder."""

    def observed(self, observation: Observation) -> None:
        """Record a pull."""

    def decided(self, decision: Decision, outcomes: Sequence[ActionOutcome]) -> None:
        """Record a decision. `outcomes` are those of the decision's actions, in their order: none if there are no
        actions or the planner only observes, and fewer than actions if the planner was stopped meanwhile."""

    def close(self) -> None:
        """Write out what is left. No call follows."""
