"""Counts the devices that workers hold, and those that one more worker takes. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

from dynamo_local.core.planning.actions import Action, AddWorker
from dynamo_local.core.planning.options import PlannerOptions
from dynamo_local.core.planning.window import RoleWindow, Window, WorkerWindow
from dynamo_local.core.shares import summed


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
