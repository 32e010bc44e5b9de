"""The devices of this machine, for workers of endpoints."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from dynamo_local.core.endpoints.devices import devices_of_worker
from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.endpoints.turns import placing
from dynamo_local.core.names import LOCAL_NODE
from dynamo_local.core.planning.actions import AddWorker
from dynamo_local.core.shares import devices_of, share_of
from dynamo_local.supervisor.endpoints.machine_facts import MachineFacts
from dynamo_local.supervisor.endpoints.revisions.observing import Room, not_there, room_for
from dynamo_local.supervisor.server.launch.blueprint import Blueprint
from state.devices.allocation import DeviceKind, Inventory, allocate
from state.devices.holding import held_elsewhere
from state.statefile.model import Component, State
from state.statefile.transitions import shares_taken


@dataclass(frozen=True)
class DevicesOfMachine:
    """This machine's (port.EndpointDevices). `own`: devices of the graph's own workers at the start."""

    all: Inventory
    facts: MachineFacts
    own: float = 0

    @property
    def kind(self) -> DeviceKind:
        return self.all.kind

    def total(self) -> float:
        return len(self.all.devices) - self.own

    def room(self, state: State, blueprint: Blueprint, wanted: Sequence[AddWorker]) -> Room:
        blueprint = msgspec.structs.replace(blueprint, inventory=self.inventory())
        room = room_for(state, blueprint, wanted, self._elsewhere())
        return Room(room.workers, room.shortage, gone=not_there(blueprint, wanted))

    def free(self, state: State) -> placing.Room:
        taken = {**shares_taken(state), **dict.fromkeys((*self._elsewhere(), *self.inventory().gone), 1.0)}
        return {device: max(0.0, 1 - taken.get(device, 0.0)) for device in self.all.ids}

    def node(self, device: int) -> str:
        return LOCAL_NODE

    def ids(self, component: Component) -> tuple[int, ...]:
        return component.devices

    def check_free(self, state: State, spec: EndpointSpec) -> None:
        gpu = devices_of_worker(spec)
        # Mockers compute nothing, and share devices with whoever does.
        elsewhere = {} if spec.engine == "mocker" else self._elsewhere()
        allocate(self.inventory(), shares_taken(state), devices_of(gpu), spec.name, elsewhere, share_of(gpu))

    def inventory(self) -> Inventory:
        return self.all.lacking(self.facts.gone(self.all))

    def _elsewhere(self) -> dict[int, str]:
        """The devices that others on the machine hold, and who holds them."""
        return {number: str(holder) for number, holder in held_elsewhere(self.all, os.getpid()).items()}
