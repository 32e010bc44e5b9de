"""The interface of policies: a policy proposes for one role one more worker, one less, or neither."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from dynamo_local.core.names import short_watcher
from dynamo_local.core.planning.options import PlannerOptions
from dynamo_local.core.planning.window import History, RoleWindow, Window


@dataclass(frozen=True)
class Proposal:
    """A policy's answer for one role. `wanted`: 1 for one more worker, -1 for one less, 0 for neither. `reason` is a
    sentence with numbers, `figures` the numbers by name. `victim` names the worker to remove (None: the one with the
    highest suffix)."""

    wanted: int
    reason: str
    figures: Mapping[str, float | None] = field(default_factory=dict)
    victim: str | None = None


class Policy(Protocol):
    """A pure function from observations to a proposal for one role. Budgets and minimums are applied afterwards."""

    def __call__(self, role: RoleWindow, window: Window, history: History, options: PlannerOptions) -> Proposal: ...


def unread(role: RoleWindow) -> str | None:
    """Return why the load of the role is not known well enough to remove a worker, or None if it is known."""
    if not role.routable:
        return "no worker is ready"
    if role.unread:
        return f"no reading from {', '.join(short_watcher(worker.watcher) for worker in role.unread)}"
    return None


STARTING_INTERVALS = 3
"""Intervals for which a role with a starting worker is left alone. No longer, since a worker may die at each start."""


def why_starting(role: RoleWindow, history: History) -> str | None:
    """Return which workers start, while the role is to be left alone for them; else None."""
    if not role.starting:
        return None
    before = [window.role(role.role) for window in history[-STARTING_INTERVALS:]]
    if len(before) == STARTING_INTERVALS and all(then is not None and bool(then.starting) for then in before):
        return None
    return f"{', '.join(short_watcher(worker.watcher) for worker in role.starting)} is starting"


def added_within(role: RoleWindow, history: History, intervals: int) -> bool:
    """Return whether a worker of the role became routable during the last `intervals` intervals. Also true if the
    planner has not run for that long: a worker may have come just before it started."""
    if len(history) < intervals:
        return True
    then = [window.role(role.role) for window in history[-intervals:]]
    return any(
        before is None or after is None or bool(names_of(after) - names_of(before))
        for before, after in pairwise([*then, role])
    )


def names_of(role: RoleWindow) -> set[str]:
    """The watchers of the workers that take requests."""
    return {worker.watcher for worker in role.routable}
