"""A server's hold on its devices (state.holding): taken before anything starts on them, kept as long as its statefile
says so, and let go once nothing of it is on them any more."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Self

from dynamo_local.bus.nats import Bus
from dynamo_local.bus.subscriptions import Answer
from dynamo_local.core.beats import until_beat
from dynamo_local.core.errors import DeviceError, NotRunningError, StateError
from dynamo_local.core.messages.admin import HoldQuestion, Holds
from dynamo_local.core.names import Subjects
from dynamo_local.supervisor.server.blueprint import Blueprint
from dynamo_local.supervisor.server.launch import Launch
from dynamo_local.supervisor.server.plan import ServiceTemplate, plan_services
from state.devices import Inventory
from state.holding import NAMES, Bound, HeldError, Holder, Names, held_elsewhere, holder_of, introduce, on_device, take
from state.model import State
from state.store import StateStore
from state.transitions import taken

_LOOK_EVERY_S = 1.0
_ANSWER_WITHIN_S = 5.0
_LOOK_AGAIN_S = 0.1
_GONE_S = 3.0
"""For what a worker that has ended has forked to be gone, too, before whoever ended it is told."""
_LEFT_OVER_S = 10.0
"""For processes of a server that was killed to be gone: one that frees much memory takes its time."""


class DeviceHolds:
    """The devices that this process holds, by name. Use as a context manager within a running event loop, in which it
    tells who asks that it is the server of `namespace`."""

    def __init__(self, namespace: str, names: Names = NAMES) -> None:
        self.names = names
        self._namespace = namespace
        self._held: dict[str, Bound] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in tuple(self._held):
            self._drop(name)

    def take(self, wanted: Iterable[str]) -> None:
        """Hold these as well, all or none. Raises HeldError."""
        taken = take(self.names, set(wanted) - self._held.keys())
        loop = asyncio.get_running_loop()
        for bound in taken.values():
            loop.add_reader(bound, introduce, bound, self._namespace)  # type: ignore[arg-type]  # a socket
        self._held |= taken

    def keep(self, wanted: Iterable[str]) -> bool:
        """Let go of all others, but for those that a process is still on. Returns whether there are none of these."""
        surplus = self._held.keys() - set(wanted)
        bound = self.names.bound() if surplus else ()
        for name in surplus:
            if not on_device(bound, name):
                self._drop(name)
        return not surplus & self._held.keys()

    def _drop(self, name: str) -> None:
        bound = self._held.pop(name)
        asyncio.get_running_loop().remove_reader(bound)  # type: ignore[arg-type]  # a socket
        bound.close()


async def secured(launch: Launch, holds: DeviceHolds) -> Launch:
    """The launch with its devices held: those that it plans, or others if somebody else has these. Raises DeviceError
    when there are too few."""
    give_up_at = time.monotonic() + _LEFT_OVER_S
    while True:
        others = await asyncio.to_thread(held_elsewhere, launch.inventory, os.getpid(), (), holds.names)
        try:
            launch = beside(launch, others)
            holds.take(names_of_plans(launch))
        except DeviceError as error:
            # Whoever was faster shows up at the next look; a name that somebody has and nobody sees does not.
            passes = isinstance(error, HeldError) or any(holder.left_over for holder in others.values())
            if not passes or time.monotonic() >= give_up_at:
                raise
            await asyncio.sleep(_LOOK_AGAIN_S)
        else:
            return launch


def beside(launch: Launch, others: Mapping[int, Holder]) -> Launch:
    """The launch on devices that nobody else holds. Raises DeviceError when there are too few. Pure."""
    elsewhere = {device_id: str(holder) for device_id, holder in others.items()}
    namespace = launch.graph.namespace
    return replace(launch, services=plan_services(namespace, launch.templates, launch.inventory, elsewhere))


def held_by_others(blueprint: Blueprint, state: State) -> dict[int, str]:
    """By device: who else holds it, as far as that matters to the server's workers. Blocks as `held_elsewhere`."""
    if all(template.virtual for template in blueprint.workers):
        return {}
    found = held_elsewhere(blueprint.inventory, state.owner.pid, taken(state))
    return {device_id: str(holder) for device_id, holder in found.items()}


def names_of_plans(launch: Launch) -> frozenset[str]:
    """Devices to be held for the services at first."""
    virtual = {template.service for template in launch.templates if template.virtual}
    devices = [device for plan in launch.services if plan.watcher.service not in virtual for device in plan.devices]
    return frozenset(launch.inventory.machine_names(devices))


def names_in_use(state: State, templates: Sequence[ServiceTemplate], inventory: Inventory) -> dict[str, int]:
    """By name: the devices that are to be held, by what the statefile says. Pure."""
    real = {template.service for template in templates if not template.virtual}
    devices = [d for component in state.components.values() if component.component in real for d in component.devices]
    return {name: device_id for device_id in devices for name in inventory.machine_names((device_id,))}


@dataclass
class DeviceHolding:
    """Has a server hold what its statefile says."""

    store: StateStore
    inventory: Inventory
    templates: Sequence[ServiceTemplate]
    holds: DeviceHolds
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def run(self, bus: Bus, subjects: Subjects) -> None:
        """Until cancelled. Answers those who have claimed devices, and looks by itself after those who were killed."""

        async def on_question(_: HoldQuestion, answer: Answer) -> None:
            with suppress(NotRunningError, StateError):
                await answer.send(Holds(await self.settle(_GONE_S)))

        await bus.serve(subjects.holds, HoldQuestion, on_question)
        while True:
            await asyncio.sleep(until_beat(time.monotonic(), _LOOK_EVERY_S))
            with suppress(NotRunningError, StateError):
                # It cannot be read. The server sees to that, and says so (files.py).
                await self.settle()

    async def settle(self, patience_s: float = 0.0) -> dict[int, str]:
        """Take what is claimed, let go of what is not, with patience for processes that are still there. Returns what
        could not be had: who has it, by device."""
        async with self._turn:
            # Within the turn: what is claimed later is asked for later.
            state = await asyncio.to_thread(self.store.read)
            wanted = names_in_use(state, self.templates, self.inventory)
            refused: dict[int, str] = {}
            for name, device_id in wanted.items():
                try:
                    self.holds.take([name])
                except HeldError:
                    refused[device_id] = await asyncio.to_thread(_told, self.holds.names, name)
            give_up_at = time.monotonic() + patience_s
            while not self.holds.keep(wanted) and time.monotonic() < give_up_at:  # noqa: ASYNC110
                await asyncio.sleep(_LOOK_AGAIN_S)  # the kernel tells nobody of names that are free
            return refused


def _told(names: Names, name: str) -> str:
    return str(holder_of(names, name, names.bound()) or Holder())


async def ask_to_hold(bus: Bus, subjects: Subjects) -> dict[int, str]:
    """Have the namespace's server hold what its statefile says. Returns as `settle`. Raises BusError, DecodeError."""
    return (await bus.ask(subjects.holds, HoldQuestion(), Holds, timeout_s=_ANSWER_WITHIN_S)).refused
