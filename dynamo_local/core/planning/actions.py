"""Actions on the workers of a running server, their outcomes, and the port to the actuator that applies them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class AddWorker:
    """Add a worker in `role`, with the command and the number of devices of its service's unsuffixed entry.

    `component` names the service. None: the service whose unsuffixed entry has that role. `revision`: text of the
    endpoint's revision that the worker is to belong to; empty for the graph's own workers. `node`: the only one that it
    may live on; empty for any.
    """

    role: str
    component: str | None = None
    revision: str = ""
    node: str = ""


@dataclass(frozen=True)
class RemoveWorker:
    """End a worker gracefully: new requests go elsewhere, its own finish, then its devices are free."""

    watcher: str
    role: str


@dataclass(frozen=True)
class SwitchRole:
    """Switch a worker from `role` to the role `to`; its engine keeps running."""

    watcher: str
    role: str
    to: str


@dataclass(frozen=True)
class Restart:
    """Replace a worker's process. Where devices are free, a new worker under another name is ready before the old one
    ends; elsewhere the watcher itself starts a new process.

    `even_the_last`: also if no worker answers requests meanwhile.
    """

    watcher: str
    role: str
    even_the_last: bool = False


Action = AddWorker | RemoveWorker | SwitchRole | Restart


def roles_of(action: Action) -> frozenset[str]:
    """Return the roles whose number of workers the action changes."""
    return frozenset({action.role, action.to}) if isinstance(action, SwitchRole) else frozenset({action.role})


@dataclass(frozen=True)
class DeviceLimits:
    """Bounds of an action. `max_devices`: held by all workers together, starting and leaving ones included. None: all
    devices of the machine."""

    max_devices: int | None = None


@dataclass(frozen=True)
class ActionOutcome:
    """The result of an action. Not done: nothing has changed, or the change is being undone; `note` says why.
    `unexplained`: a process has ended without a word, as one that is killed does. `node_failed`: the node that was to
    run it cannot."""

    action: Action
    done: bool
    watcher: str | None
    note: str
    took_s: float
    unexplained: bool = False
    node_failed: bool = False


class Actuator(Protocol):
    """Applies actions for the planner and for commands such as `dynamo scale` and `dynamo drain`."""

    async def apply(self, action: Action, limits: DeviceLimits) -> ActionOutcome:
        """Apply an action; return once it is complete or undone. An added worker is routable by then; a removed one has
        ended and its devices are free. Each implementation has a deadline. Raises StateError or SupervisorError only
        if the graph cannot be reached or changed at all."""

    async def reconcile(self) -> tuple[str, ...]:
        """Bring statefile, circus and processes into agreement after a crash at any step. Idempotent. Returns a note
        for each correction."""
