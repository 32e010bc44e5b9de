"""Holds a server's devices on the machine (state.devices.holding).

A device is taken before a process starts on it, held while the statefile claims it, and let go of once no process of
the server is on it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Self

from dynamo_local.core.beats import until_beat
from dynamo_local.core.errors import DeviceError, NotRunningError, StateError
from dynamo_local.supervisor.server.launch.blueprint import Blueprint
from dynamo_local.supervisor.server.launch.plan import plan_services
from dynamo_local.supervisor.server.launch.templates import ServiceTemplate
from state.devices.allocation import Inventory
from state.devices.holding import (
    NAMES,
    Bound,
    HeldError,
    Holder,
    held_elsewhere,
    holder_of,
    introduce,
    on_device,
    take,
)
from state.statefile.model import State
from state.statefile.store import StateStore
from state.statefile.transitions import taken

if TYPE_CHECKING:
    from dynamo_local.supervisor.server.launch.plan import Launch


_EVERY_S = 1.0
_RETRY_S = 0.1
_GONE_S = 3.0
"""The time that children of an ended worker have to be gone before the one who ended it is answered."""

_LEFT_OVER_S = 10.0
"""The time that processes of a killed server have to be gone. Freeing much memory takes seconds."""


@dataclass
class DeviceHolds:
    """The devices that this process holds, by name. Use as a context manager within a running event loop.

    The loop answers processes that ask who holds a device: the server of `namespace`.
    """

    namespace: str
    _held: dict[str, Bound] = field(default_factory=dict, init=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in tuple(self._held):
            self._drop(name)

    def take(self, wanted: Iterable[str]) -> None:
        """Take these devices in addition, all or none. Raises HeldError."""
        taken = take(NAMES, set(wanted) - self._held.keys())
        loop = asyncio.get_running_loop()
        for bound in taken.values():
            loop.add_reader(bound, introduce, bound, self.namespace)  # type: ignore[arg-type]  # a socket
        self._held |= taken

    def keep(self, wanted: Iterable[str]) -> bool:
        """Let go of all other devices, except those that a process is still on. Returns whether all could be let go."""
        surplus = self._held.keys() - set(wanted)
        bound = NAMES.bound() if surplus else ()
        for name in surplus:
            if not on_device(bound, name):
                self._drop(name)
        return not surplus & self._held.keys()

    def _drop(self, name: str) -> None:
        bound = self._held.pop(name)
        asyncio.get_running_loop().remove_reader(bound)  # type: ignore[arg-type]  # a socket
        bound.close()


async def secured(launch: Launch, holds: DeviceHolds) -> Launch:
    """Take the devices that the launch needs, and return it with those that it got. Raises DeviceError when too few are
    free."""
    give_up_at = time.monotonic() + _LEFT_OVER_S
    while True:
        others = await asyncio.to_thread(held_elsewhere, launch.inventory, os.getpid())
        try:
            launch = beside(launch, others)
            holds.take(names_of_plans(launch))
        except DeviceError as error:
            # Worth another try: a server that was faster is seen as a holder then, and leftover processes may be gone.
            may_pass = isinstance(error, HeldError) or any(holder.left_over for holder in others.values())
            if not may_pass or time.monotonic() >= give_up_at:
                raise
            await asyncio.sleep(_RETRY_S)
        else:
            return launch


def beside(launch: Launch, others: Mapping[int, Holder]) -> Launch:
    """Plan the launch on devices that nobody else holds. Raises DeviceError when too few are free. Pure."""
    elsewhere = {device_id: str(holder) for device_id, holder in others.items()}
    namespace = launch.graph.namespace
    return replace(launch, services=plan_services(namespace, launch.own_templates, launch.inventory, elsewhere))


def names_of_plans(launch: Launch) -> frozenset[str]:
    """Names of the devices that the services need at start-up. Virtual services need none."""
    virtual = {template.service for template in launch.templates if template.virtual}
    devices = [device for plan in launch.services if plan.watcher.service not in virtual for device in plan.devices]
    return frozenset(launch.inventory.machine_names(devices))


def names_in_use(state: State, templates: Sequence[ServiceTemplate], inventory: Inventory) -> dict[str, int]:
    """Names and ids of the devices of this node that are to be held, by the claims in the statefile. Pure."""
    real = {(template.service, template.revision) for template in templates if not template.virtual}
    claims = (c for c in state.here.values() if (c.component, c.revision) in real)
    devices = [device for component in claims for device in component.devices]
    return {name: device_id for device_id in devices for name in inventory.machine_names((device_id,))}


@dataclass
class DeviceHolding:
    """Keeps the devices that a server holds in line with its statefile. `templates` gives those of all services that it
    has now. `on_claims` is called with each state that is read."""

    store: StateStore
    inventory: Inventory
    templates: Callable[[], Sequence[ServiceTemplate]]
    holds: DeviceHolds
    on_claims: Callable[[State], None] = lambda _: None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def elsewhere(self) -> dict[int, str]:
        """Return the devices that others hold, each with its holder in words."""
        found = await asyncio.to_thread(held_elsewhere, self.inventory, os.getpid())
        return {device_id: str(holder) for device_id, holder in found.items()}

    async def run(self) -> None:
        """Hold what is claimed, every second, until cancelled."""
        while True:
            await asyncio.sleep(until_beat(time.monotonic(), _EVERY_S))
            # A statefile that cannot be read is repaired and reported elsewhere (files.py).
            with suppress(NotRunningError, StateError):
                await self.hold_claimed(0.0)

    async def hold_claimed(self, wait_s: float = _GONE_S) -> dict[int, str]:
        """Take the devices that are claimed, and let go of those that are not.

        `wait_s`: how long to wait for processes that are still on the latter. Returns the devices that could not be
        taken, each with its holder.
        """
        async with self._lock:
            # Read under the lock: every claim that precedes a call is seen by it.
            state = await asyncio.to_thread(self.store.read)
            self.on_claims(state)
            templates = await asyncio.to_thread(self.templates)
            wanted = names_in_use(state, templates, self.inventory)
            refused: dict[int, str] = {}
            for name, device_id in wanted.items():
                try:
                    self.holds.take([name])
                except HeldError:
                    refused[device_id] = await asyncio.to_thread(_holder, name)
            give_up_at = time.monotonic() + wait_s
            while not self.holds.keep(wanted) and time.monotonic() < give_up_at:  # noqa: ASYNC110
                await asyncio.sleep(_RETRY_S)  # the kernel gives no event when a name is free
            return refused


def _holder(name: str) -> str:
    return str(holder_of(NAMES, name, NAMES.bound()) or Holder())


# Devices of this machine that other servers hold, as a running server sees them.


def held_by_others(blueprint: Blueprint, state: State) -> dict[int, str]:
    """Devices that others hold, each with its holder; empty if all workers are virtual. Blocks as `held_elsewhere`."""
    if all(template.virtual for template in blueprint.workers):
        return {}
    found = held_elsewhere(blueprint.inventory, state.owner.pid, taken(state))
    return {device_id: str(holder) for device_id, holder in found.items()}
