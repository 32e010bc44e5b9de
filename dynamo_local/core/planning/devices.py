"""Counts the devices that workers hold, and those that one more worker takes. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from dynamo_local.core.planning.options import PlannerOptions
from dynamo_local.core.planning.window import RoleWindow, WorkerWindow


def held_by(worker: WorkerWindow, options: PlannerOptions) -> int:
    """Return the devices that a worker counts for. One without devices (a mocker, say) counts like any engine of its
    role: otherwise the budget would not limit the number of such workers."""
    return worker.devices or options.devices_of_engine(worker.role)


def held_by_all(workers: Iterable[WorkerWindow], options: PlannerOptions) -> int:
    """Return the devices that these workers count for together."""
    return sum(held_by(worker, options) for worker in workers)


def devices_of_one_more(role: RoleWindow, options: PlannerOptions) -> int:
    """Return the devices that one more worker takes. Running workers that hold more than the options say are right."""
    return max([options.devices_of_engine(role.role), *(worker.devices for worker in role.workers)])
