"""What can be changed about the workers that run, and what is to become of it. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class AddWorker:
    """One more worker in `role`, with the command and the devices a worker of the unsuffixed entry has.

    `component` names the service whose unsuffixed entry is the template. None: the one whose template has that role.
    """

    role: str
    component: str | None = None


@dataclass(frozen=True)
class RemoveWorker:
    """End this watcher in order: nothing new for it, what it has finishes, its devices are free then."""

    watcher: str
    role: str


@dataclass(frozen=True)
class SwitchRole:
    """This watcher takes up another role; its engine stays."""

    watcher: str
    role: str
    to: str


@dataclass(frozen=True)
class Restart:
    """This watcher's process ends and another one works in its place: a worker that is ready before, on other devices
    and under another name, where there are any; else the next process of the watcher itself.

    `even_the_last`: also when nobody answers requests meanwhile.
    """

    watcher: str
    role: str
    even_the_last: bool = False


Change = AddWorker | RemoveWorker | SwitchRole | Restart


def roles_of(change: Change) -> frozenset[str]:
    """The roles whose number of workers it changes."""
    return frozenset({change.role, change.to}) if isinstance(change, SwitchRole) else frozenset({change.role})


@dataclass(frozen=True)
class DeviceLimits:
    """`max_devices`: held by all workers together, those included that start or leave. None: as many as there are."""

    max_devices: int | None = None


@dataclass(frozen=True)
class ActionOutcome:
    """What became of a change. Not done: everything is as it was before, or is being undone, and `note` says why."""

    change: Change
    done: bool
    watcher: str | None
    note: str
    took_s: float


class Actuator(Protocol):
    """Makes changes real, one at a time. The same for the planner, `dynamo scale` and `dynamo drain`."""

    async def apply(self, change: Change, limits: DeviceLimits) -> ActionOutcome:
        """Returns when the change is complete, or undone: a worker that is added is routable, one that is removed is
        gone and its devices are free. Has a deadline of its own. Raises StateError or SupervisorError only when the
        graph cannot be reached or changed at all."""

    async def reconcile(self) -> tuple[str, ...]:
        """Bring statefile, circus and reality together after a crash at any step. Idempotent; returns notes."""
