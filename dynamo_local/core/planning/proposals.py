"""What a policy is: it says for one role whether there are too few workers or too many."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from dynamo_local.core.planning.options import PlannerOptions
from dynamo_local.core.planning.window import History, RoleWindow, Window


@dataclass(frozen=True)
class Proposal:
    """`wanted`: 1 one more worker, -1 one less, 0 neither. `victim` names the worker to go; None: the one with the
    highest suffix."""

    wanted: int
    reason: str
    figures: Mapping[str, float | None] = field(default_factory=dict)
    victim: str | None = None


class Policy(Protocol):
    """Pure: the same arguments, the same wish. Knows neither budgets nor minimums."""

    def __call__(self, role: RoleWindow, window: Window, history: History, options: PlannerOptions) -> Proposal: ...


def unread(role: RoleWindow) -> str | None:
    """Why the load of the role is not known well enough to take a worker away. None: it is."""
    if not role.routable:
        return "no worker is ready"
    if role.unread:
        return f"no reading from {', '.join(worker.watcher for worker in role.unread)}"
    return None


def added_within(role: RoleWindow, history: History, intervals: int) -> bool:
    """Whether a worker of the role became routable during the last so many intervals. Yes as well when nobody watched
    for so long: the planner has only started."""
    if len(history) < intervals:
        return True
    then = [window.role(role.role) for window in history[-intervals:]]
    return any(
        before is None or after is None or bool(_names(after) - _names(before))
        for before, after in pairwise([*then, role])
    )


def _names(role: RoleWindow) -> set[str]:
    return {worker.watcher for worker in role.routable}
