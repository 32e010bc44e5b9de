"""What can be ordered: actions on the workers of a running server, numbers of workers, and what becomes of both."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from dynamo_local.core.names import FIRST_OF_MAIN


class AddWorker(msgspec.Struct, frozen=True, tag=True, tag_field="action"):
    """Add a worker in `role`, with the command and the number of devices of its service's unsuffixed entry.

    `component` names the service. None: the service whose unsuffixed entry has that role. `revision`: text of the
    endpoint's revision that the worker is to serve. `node`: the only one that it
    may live on; empty for any.
    """

    role: str
    component: str | None = None
    revision: str = FIRST_OF_MAIN
    node: str = ""


class RemoveWorker(msgspec.Struct, frozen=True, tag=True, tag_field="action"):
    """End a worker gracefully: new requests go elsewhere, its own finish, then its devices are free."""

    watcher: str
    role: str


class SwitchRole(msgspec.Struct, frozen=True, tag=True, tag_field="action"):
    """Switch a worker from `role` to the role `to`; its engine keeps running."""

    watcher: str
    role: str
    to: str


class Restart(msgspec.Struct, frozen=True, tag=True, tag_field="action"):
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


@dataclass(frozen=True)
class ScaleEndpoint:
    """Order for so many workers now, within the endpoint's bounds. None: as many as before."""

    name: str
    workers: int | None = None
    prefill_workers: int | None = None


@dataclass(frozen=True)
class OrderOutcome:
    """What became of an order. Not done: the server refused it or did not answer, and `note` says why."""

    done: bool
    note: str = ""


Outcome = ActionOutcome | OrderOutcome
