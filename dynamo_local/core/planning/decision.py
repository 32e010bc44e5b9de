"""The decision about an endpoint: its changes and its reasons. Plain data."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dynamo_local.core.fleet.view import PREFILL_ROLE
from dynamo_local.core.messages.reports import Event
from dynamo_local.core.names import MAIN, short_watcher
from dynamo_local.core.planning.actions import (
    Action,
    ActionOutcome,
    AddWorker,
    OrderOutcome,
    Outcome,
    RemoveWorker,
    Restart,
    ScaleEndpoint,
    SwitchRole,
)
from dynamo_local.core.planning.window import Observation

_IN_PLACE = "in place of "
"""Begins the note of an outcome that names a replaced worker."""

_NUMBER = re.compile(r"\d+(?:\.\d+)?")


@dataclass(frozen=True)
class Count:
    """Numbers of workers of one role, where a number is ordered.

    `ordered`: before this decision. `gets`: the share of the budget. `order`: to run now, more than `ordered` only as
    far as devices are free. `ready`: workers that take requests (None: unknown).
    """

    ordered: int
    gets: int
    order: int
    ready: int | None


@dataclass(frozen=True)
class Verdict:
    """The result for one role. `reason` is a sentence with numbers; `figures` gives the same numbers by name (None:
    unknown)."""

    role: str
    wanted: int
    """What the policy asks for: with a `count` the number of workers, else 1 (one more worker), -1 (one less) or 0."""
    reason: str
    figures: Mapping[str, float | None] = field(default_factory=dict)
    count: Count | None = None

    @property
    def change(self) -> str:
        """The change of the number in words, such as "4 prefill workers instead of 1"; empty if there is none."""
        count = self.count
        if count is None or count.order == count.ordered:
            return ""
        workers = "worker" if count.order == 1 else "workers"
        kind = f"{PREFILL_ROLE} " if self.role == PREFILL_ROLE else ""
        return f"{count.order} {kind}{workers} instead of {count.ordered}"


@dataclass(frozen=True)
class Decision:
    """The verdicts of an endpoint's roles and what follows from them: actions, or an order of numbers of workers.

    `at` is CLOCK_MONOTONIC, in seconds. `devices`: held by all workers of the server before the changes, of at most
    `max_devices` (None: unknown). `acts`: whether the changes are made; a planner that only observes would make them.
    """

    at: float
    policy: str
    verdicts: tuple[Verdict, ...]
    actions: tuple[Action, ...]
    devices: float | None
    max_devices: int
    acts: bool = True
    endpoint: str = MAIN

    @property
    def by_actions(self) -> bool:
        """Whether it is about single workers, and not about their number."""
        return all(verdict.count is None for verdict in self.verdicts)

    @property
    def order(self) -> ScaleEndpoint | None:
        """The order to the server; None if the numbers stay as they are."""
        changed = {each.role: each.count.order for each in self.verdicts if each.count and each.change}
        if not changed:
            return None
        prefill = changed.pop(PREFILL_ROLE, None)
        return ScaleEndpoint(self.endpoint, next(iter(changed.values()), None), prefill)

    @property
    def changes(self) -> bool:
        """Whether anything changes, or would."""
        return bool(self.actions) or self.order is not None

    @property
    def change(self) -> str:
        """The changes in words: "add a decode worker", "chat: 4 workers instead of 2", with "would" if the planner only
        observes."""
        if self.by_actions:
            return ", ".join(self._described(action) for action in self.actions) or "no change"
        changes = ", ".join(each.change for each in self.verdicts if each.change)
        would = "" if self.acts else "would have "
        return f"{self.endpoint}: {would}{changes}" if changes else f"{self.endpoint}: no change"

    @property
    def reasons(self) -> str:
        """The reasons in one line, by role unless there is one number."""
        if not self.by_actions and len(self.verdicts) == 1:
            return self.verdicts[0].reason
        return "; ".join(f"{verdict.role}: {verdict.reason}" for verdict in self.verdicts)

    @property
    def text(self) -> str:
        """Changes and reasons in one line."""
        return f"{self.change} ({self.reasons})"

    @property
    def gist(self) -> tuple[str, ...]:
        """The decision without the numbers in its reasons, by which a repeated decision is recognised."""
        return self.change, *(
            f"{each.role} {each.count.gets if each.count else each.wanted} {_NUMBER.sub('#', each.reason)}"
            for each in self.verdicts
        )

    def _described(self, action: Action) -> str:
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


def event_of_order(decision: Decision, outcome: OrderOutcome | None) -> Event:
    """Return the event of a decision with an order. `outcome` is None if the planner only observes."""
    if outcome is None:
        return Event("planner", decision.change, decision.reasons)
    what = decision.change if outcome.done else f"not done: {decision.change}: {outcome.note}"
    return Event("scale", what, f"planner: {decision.reasons}")


# The port to whatever shows the planner's observations and decisions: event files, metrics, a terminal.


class Recorder:
    """Receives observations and decisions in order, from one caller. Each call does nothing unless a recorder says
    otherwise, and returns at once: slow writes belong in a thread of the recorder."""

    def observed(self, observation: Observation, decisions: Sequence[Decision]) -> None:
        """Record a pull, with the decisions that were made at it."""

    def decided(self, decision: Decision, outcomes: Sequence[Outcome]) -> None:
        """Record a decision: each one about actions, one about numbers only if it changes something or its gist is new.

        `outcomes` are those of the decision's actions, in their order, or that of its order: none if nothing changes or
        the planner only observes, and fewer than actions if the planner was stopped meanwhile."""

    def acting(self, action: Action | None) -> None:
        """Note that an action begins; None: all are over."""

    def changed(self, event: Event) -> None:
        """Record what the server has done to an endpoint by itself: parked it, let it sleep, woken it, or given its
        devices to another one."""

    def close(self) -> None:
        """Write out what is left. No call follows."""
