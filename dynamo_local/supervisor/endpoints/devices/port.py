"""What is asked about devices before workers of endpoints start, wake or yield."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.endpoints.turns import placing
from dynamo_local.core.planning.actions import AddWorker
from dynamo_local.supervisor.endpoints.revisions.observing import Room
from dynamo_local.supervisor.server.launch.blueprint import Blueprint
from state.devices.allocation import DeviceKind, Inventory
from state.statefile.model import Component, State


class EndpointDevices(Protocol):
    """The devices of the endpoints of one server. Its methods block for milliseconds."""

    @property
    def kind(self) -> DeviceKind: ...

    def total(self) -> float:
        """Number of devices that workers may have together, while others hold none."""

    def room(self, state: State, blueprint: Blueprint, wanted: Sequence[AddWorker]) -> Room:
        """For how many of these workers there are devices."""

    def free(self, state: State) -> placing.Room:
        """What is left of each device, of nodes that can run workers."""

    def node(self, device: int) -> str:
        """The node of a device of `free`."""

    def ids(self, component: Component) -> tuple[int, ...]:
        """Ids of a worker's devices in `free`; none of devices that are gone with their node."""

    def check_free(self, state: State, spec: EndpointSpec) -> None:
        """Raise DeviceError if no devices are free for one more worker of an endpoint."""

    def inventory(self) -> Inventory:
        """The devices of this machine, with those marked that are gone."""
