"""What a process is started from: the template of its service, and the plan for the one process.

Apart from `plan`, since commands such as `dynamo ps` read templates and need nothing of the SDK.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from dynamo_local.core.names import LOCAL_NODE, Watcher, check_watcher
from dynamo_local.core.shares import held

ENDPOINT_WORKERS = "workers of endpoints"
"""Stands for the workers of all endpoints in the stop order. No service has such a name."""


class WatcherPlan(msgspec.Struct, frozen=True):
    """A process to be started. `environment` is added to that of the server, and overrides it. `share`: the part of its
    one device that the process gets; 1 for devices that it holds whole. `node`: where it runs. `revision`: that it
    serves, as in the statefile."""

    watcher: Watcher
    role: str
    argv: tuple[str, ...]
    environment: Mapping[str, str] = {}
    devices: tuple[int, ...] = ()
    share: float = 1.0
    node: str = LOCAL_NODE
    revision: str = ""

    def __post_init__(self) -> None:
        check_watcher(self.watcher)

    @property
    def name(self) -> str:
        return str(self.watcher)


class ServiceTemplate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The properties that all processes of a service share.

    `environment` may hold secrets. `devices`: number of devices of each process. `workers`: number of processes at
    start-up. `virtual`: the processes compute nothing, and share devices with others. `revision`: text of the
    endpoint's revision that the processes serve; empty for services that serve no model of their own. `share`: below 1,
    the part of one device that each process gets.
    """

    service: str
    role: str
    argv: tuple[str, ...]
    environment: dict[str, str]
    devices: int
    workers: int
    virtual: bool = False
    revision: str = ""
    share: float = 1.0

    @property
    def device_count(self) -> float:
        """What the devices of one process count for: their number, or the share of one."""
        return held(self.devices, self.share)

    def watcher(self, namespace: str, index: int = 0) -> Watcher:
        """The watcher of the service's process with that index."""
        return Watcher.of(namespace, self.service, index, self.revision)
