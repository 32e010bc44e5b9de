"""This machine as a place, with a circusd and devices that are pretended; and what only this machine has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dynamo_local.core.errors import DeviceError, StateError, SupervisorError
from dynamo_local.core.names import Watcher
from dynamo_local.supervisor.places.local import Books, LocalPlaces
from dynamo_local.supervisor.places.port import Need, Places, Slot
from dynamo_local.supervisor.server.launch.templates import WatcherPlan
from state.devices.allocation import cpu_slots
from state.statefile.transitions import taken
from tests.places_contract import DEVICES, ONE, PlacesContract, Program, reserved, started, worker
from tests.unit.supervisor.actuator.fake_ports import BooksWithoutThreads, FakePorts, Start

STARTS: dict[Program, Start] = {"runs": "well", "dies": "dies", "stubborn": "hangs"}


@dataclass
class Machine(FakePorts):
    """`answers`: whether circusd does. `is_readable`: the statefile, to whoever holds devices. `log`: of all
    watchers."""

    answers: bool = True
    is_readable: bool = True
    log: Path = field(default_factory=Path)

    async def statuses(self) -> Mapping[str, str]:
        if not self.answers:
            raise SupervisorError("circus did not answer")
        return await super().statuses()

    async def add(self, plan: WatcherPlan) -> None:
        await super().add(plan)
        if self.processes.get(plan.name) is None:
            self.log.write_text("error: no memory\n")

    async def hold_claimed(self) -> Mapping[int, str]:
        if not self.is_readable:
            raise StateError("the statefile is damaged")
        return await super().hold_claimed()


class MemorySite:
    def __init__(self, log: Path) -> None:
        self.machine = Machine(log=log)
        self.books: Books = BooksWithoutThreads(self.machine)
        inventory = cpu_slots(range(DEVICES), DEVICES)
        self.places: Places = LocalPlaces(self.books, inventory, self.machine, self.machine, lambda _: log)

    def plan(self, watcher: Watcher, slot: Slot, program: Program) -> WatcherPlan:
        self.machine.starts[str(watcher)] = STARTS[program]
        return WatcherPlan(watcher, "decode", ("run",), {"KEEP": "me"}, slot.devices)

    async def begun(self, name: str) -> None:
        pass

    def pids(self, name: str) -> tuple[int, ...]:
        return (1,) if name in self.machine.processes else ()

    async def lose(self) -> None:
        self.machine.answers = False


@pytest.fixture
def site(tmp_path: Path) -> MemorySite:
    return MemorySite(tmp_path / "log")


class TestLocalPlaces(PlacesContract):
    pass


async def test_devices_that_others_hold_are_left_to_them(site: MemorySite) -> None:
    site.machine.others = {0: "somebody"}
    assert (await reserved(site)).devices == (1,)
    # One that computes nothing shares them.
    assert (await reserved(site, 1, Need("decode", 1, virtual=True))).devices == (0,)


async def test_a_reservation_is_held_on_the_machine_or_is_none(site: MemorySite) -> None:
    site.machine.faster = {0: "somebody"}
    with pytest.raises(DeviceError, match="taken by somebody else; CPU slot 0 is held by somebody"):
        await reserved(site)
    assert taken(site.machine.state) == site.machine.held == frozenset()
    site.machine.is_readable = False
    with pytest.raises(StateError, match="damaged"):
        await reserved(site)
    assert taken(site.machine.state) == frozenset()


async def test_devices_are_released_also_while_the_server_cannot_let_go_of_them(site: MemorySite) -> None:
    await site.places.reserve(worker(), ONE)
    site.machine.is_readable = False
    await site.places.release(str(worker()))
    assert taken(site.machine.state) == frozenset()


async def test_an_error_of_an_earlier_process_is_not_one_of_this(site: MemorySite) -> None:
    site.machine.log.write_text("error: of an earlier one\n")
    await started(site)
    assert await site.places.last_error(str(worker())) is None
