"""The interface of policies: a policy proposes for one role one more worker, one less, or neither."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from dynamo_local.core.names import short_watcher
from dynamo_local.core.planning.actions import Action, AddWorker
from dynamo_local.core.planning.options import PlannerOptions
from dynamo_local.core.planning.window import History, RoleWindow, Window, WorkerWindow
from dynamo_local.core.shares import summed


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


# Counts the devices that workers hold, and those that one more worker takes. Pure.


def held_by(worker: WorkerWindow, options: PlannerOptions) -> float:
    """Return the devices that a worker counts for. One without devices (a mocker, say) counts like any engine of its
    role: otherwise the budget would not limit the number of such workers."""
    return worker.devices or options.devices_of_engine(worker.role)


def held_by_all(workers: Iterable[WorkerWindow], options: PlannerOptions) -> float:
    """Return the devices that these workers count for together."""
    return summed(held_by(worker, options) for worker in workers)


def held_after(window: Window, actions: Iterable[Action], options: PlannerOptions) -> float:
    """Return the devices that the graph's own workers count for once these actions have begun: those of workers that
    are added count already, those of workers that end still do."""
    roles = window.roles or {}
    added = (devices_of_one_more(roles[each.role], options) for each in actions if isinstance(each, AddWorker))
    return summed([*(held_by_all(role.workers, options) for role in roles.values()), *added])


def devices_for_minimum(workers: Iterable[WorkerWindow], options: PlannerOptions) -> int:
    """Return the devices that these workers count for where a minimum is to be kept: a worker with a share of a device
    is as good as one with all of it."""
    return sum(math.ceil(held_by(worker, options)) for worker in workers)


def devices_of_one_more(role: RoleWindow, options: PlannerOptions) -> float:
    """Return the devices that one more worker takes. Running workers are right that hold more than the options say, or
    shares."""
    most = max((worker.devices for worker in role.workers), default=0)
    return most if 0 < most < 1 else max(options.devices_of_engine(role.role), most)
