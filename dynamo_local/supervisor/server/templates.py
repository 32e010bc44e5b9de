"""What a process is started from: the template of its service, and the plan for the one process.

Apart from plan.py, since commands such as `dynamo ps` read templates and need nothing of the SDK.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from dynamo_local.core.names import Watcher


@dataclass(frozen=True)
class WatcherPlan:
    """A process to be started. `environment` is added to that of the server, and overrides it."""

    watcher: Watcher
    role: str
    argv: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return str(self.watcher)


class ServiceTemplate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The properties that all processes of a service share.

    `environment` may hold secrets. `devices`: number of devices of each process. `workers`: number of processes at
    start-up. `virtual`: the processes compute nothing, and share devices with others.
    """

    service: str
    role: str
    argv: tuple[str, ...]
    environment: dict[str, str]
    devices: int
    workers: int
    virtual: bool = False
