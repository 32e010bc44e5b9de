"""What a running server gives to those that change its processes from within: the controller of endpoints."""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from dynamo_local.bus.nats import Bus
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.messages.reports import Event
from dynamo_local.supervisor.actuator.actuators import Actuators
from dynamo_local.supervisor.circus.process_registry import Registration
from dynamo_local.supervisor.control.api import ControlApi
from dynamo_local.supervisor.places.capacity import NodeCapacity
from dynamo_local.supervisor.server.launch.blueprint import BlueprintFile
from dynamo_local.supervisor.server.launch.plan import Launch
from dynamo_local.supervisor.server.nats.streams import ServerStreams
from dynamo_local.supervisor.server.reports.report import Report
from dynamo_local.supervisor.server.settings import ServerSettings
from state.locks import ServerLock


@dataclass(frozen=True)
class ControlledServer:
    """A server whose own watchers are all registered.

    `actuators`: makes those of endpoints. `lock`: on the namespace, held as long as the server runs. `registration`:
    has the statefile, with what is heard. `blueprint`: holds the templates of endpoints' revisions, which precede their
    first worker. `streams`: makes what a revision needs on the bus. `given_up`: watchers of endpoints' workers that
    keep ending and are not started again, each with the reason; they hold their devices until they are removed.
    `record`: notes an event. `members`: the presences of all processes. `control`: answers orders. `nodes`: gives the
    devices of the nodes, as of a second ago, where workers live on those of a cluster; None if they live on this
    machine.
    """

    launch: Launch
    actuators: Actuators
    lock: ServerLock
    settings: ServerSettings
    bus: Bus
    registration: Registration
    blueprint: BlueprintFile
    streams: ServerStreams
    given_up: Mapping[str, str]
    report: Report
    record: Callable[[Event], None]
    members: Callable[[], Collection[Presence]]
    control: ControlApi
    nodes: Callable[[], Mapping[str, NodeCapacity]] | None = None


Controller = Callable[[ControlledServer], Coroutine[Any, Any, None]]
"""Runs within a server until it is cancelled. An error that it raises ends the server."""
