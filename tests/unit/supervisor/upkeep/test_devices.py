"""A server takes its devices, keeps what its statefile says, and leaves to others what they have."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Collection
from pathlib import Path

import msgspec
import pytest

from dynamo_local.core.errors import DeviceError
from dynamo_local.planner.session import usable_devices
from dynamo_local.sdk.config.resolved import ResolvedGraph, ResolvedService
from dynamo_local.supervisor.server.launch.blueprint import Blueprint
from dynamo_local.supervisor.server.launch.plan import HttpAddress, Launch, service_templates
from dynamo_local.supervisor.upkeep import devices
from dynamo_local.supervisor.upkeep.devices import (
    DeviceHolding,
    DeviceHolds,
    beside,
    held_by_others,
    names_in_use,
    secured,
)
from state.devices.allocation import DEVICES_VARIABLE, Device, Inventory, cpu_slots
from state.devices.holding import NAMES, Bound, Holder, held_elsewhere, mark, take
from state.machine.processes import this_process
from state.paths import StatePaths
from state.statefile.store import StateStore
from state.statefile.transitions import claim, new_state, release


@pytest.fixture
def inventory() -> Inventory:
    """Three GPUs that no other test has."""
    return Inventory("gpu", tuple(Device(i, "gpu", "H100", uuid=f"GPU-{secrets.token_hex(8)}") for i in range(3)))


@pytest.fixture(autouse=True)
def everybody_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the holders of this process seen as if they were in another one."""

    def seen(inventory: Inventory, server: int, mine: Collection[int] = ()) -> dict[int, Holder]:
        return held_elsewhere(inventory, os.getppid(), mine)

    monkeypatch.setattr(devices, "held_elsewhere", seen)


def launched(root: Path, inventory: Inventory, *, workers: int = 1, virtual: bool = False) -> Launch:
    worker = ResolvedService("Worker", "m:Worker", "decode", workers, 1, 0, {}, {}, (), None, virtual)
    graph = ResolvedGraph("m:Front", "ns", (worker, ResolvedService("Front", "m:Front", "front", 1, 0, 0, {}, {}, ())))
    http = HttpAddress("127.0.0.1", 1)
    launch = Launch(graph, inventory, StatePaths(root, "ns"), None, http, service_templates(graph, root, http), ())
    return beside(launch, {})


def devices_of(launch: Launch) -> list[int]:
    return [device for plan in launch.services for device in plan.devices]


def somebody_else(inventory: Inventory, *ids: int) -> list[Bound]:
    """Holds these devices."""
    return list(take(NAMES, inventory.machine_names(ids)).values())


async def test_a_server_takes_devices_that_nobody_else_has(tmp_path: Path, inventory: Inventory) -> None:
    others = somebody_else(inventory, 0)
    with DeviceHolds("ns") as holds:
        launch = await secured(launched(tmp_path, inventory), holds)
        assert devices_of(launch) == [1]
        others += somebody_else(inventory, 2)
        with pytest.raises(DeviceError), DeviceHolds("other") as more:
            await secured(launched(tmp_path, inventory), more)
    # What it held is free when it has ended.
    others += somebody_else(inventory, 1)
    _close(others)


def _close(bound: list[Bound]) -> None:
    for each in bound:
        each.close()


async def test_a_refusal_names_the_holder_and_the_remedy(tmp_path: Path, inventory: Inventory) -> None:
    with DeviceHolds("mine") as holds:
        holds.take(inventory.machine_names([0, 1]))
        others = await asyncio.to_thread(held_elsewhere, inventory, os.getppid())
    with pytest.raises(DeviceError) as refused:
        beside(launched(tmp_path, inventory, workers=2), others)
    who = str(others[0])
    assert who.startswith(f"the server of namespace mine (pid {os.getpid()}, user ")
    assert str(refused.value) == (
        f"worker 2 of 2 of Worker needs 1 device, 0 of 3 GPUs are free; GPU 0 is held by {who}; "
        f"GPU 1 is held by {who}; end that, or ask for fewer workers or devices a worker"
    )
    slots = cpu_slots([0, 1], 2, exclusive=True)
    with pytest.raises(DeviceError, match=r"or give this server CPU slots that may share cores \(--cpu-slots 2\)$"):
        beside(launched(tmp_path, slots, workers=2), {1: Holder(7, "me", "other")})


async def test_what_a_killed_server_has_left_is_waited_for(tmp_path: Path, inventory: Inventory) -> None:
    left = [mark({DEVICES_VARIABLE: name}) for name in inventory.machine_names(inventory.ids)]
    with DeviceHolds("ns") as holds:
        waiting = asyncio.create_task(secured(launched(tmp_path, inventory, workers=3), holds))
        done, _ = await asyncio.wait([waiting], timeout=0.3)
        assert not done
        for marks in left:
            _close(marks)
        assert devices_of(await waiting) == [0, 1, 2]


async def test_what_is_left_for_too_long_is_told_of(
    tmp_path: Path, inventory: Inventory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "_LEFT_OVER_S", 0.0)
    marks = mark({DEVICES_VARIABLE: inventory.machine_names([0])[0]})
    with (
        DeviceHolds("ns") as holds,
        pytest.raises(DeviceError, match="is held by a process of a server that has ended"),
    ):
        await secured(launched(tmp_path, inventory, workers=3), holds)
    _close(marks)


async def test_mockers_take_devices_from_nobody(tmp_path: Path, inventory: Inventory) -> None:
    others = somebody_else(inventory, 0, 1, 2)
    with DeviceHolds("ns") as holds:
        launch = await secured(launched(tmp_path, inventory, workers=3, virtual=True), holds)
    assert devices_of(launch) == [0, 1, 2]
    assert all(plan.environment[DEVICES_VARIABLE] == "" for plan in launch.services)
    _close(others)


async def test_the_statefile_says_what_is_held(tmp_path: Path, inventory: Inventory) -> None:
    launch = launched(tmp_path, inventory)
    store = StateStore(launch.paths)
    state = new_state("ns", "ipc://x", "gpu", this_process())
    store.create(claim(state, "ns_Worker", role="decode", cmd="w", devices=[0]))
    others = somebody_else(inventory, 2)
    with DeviceHolds("ns") as holds:
        holding = DeviceHolding(store, inventory, lambda: launch.templates, holds)
        assert await holding.hold_claimed(0.0) == {}
        assert not _free(inventory, 0)
        store.update(lambda state: claim(state, "ns_Worker_1", role="decode", cmd="w", devices=[1, 2]))
        (refused,) = (await holding.hold_claimed(0.0)).items()
        assert refused[0] == 2
        assert f"pid {os.getpid()}" in refused[1]
        assert not _free(inventory, 1)
        store.update(lambda state: release(release(state, "ns_Worker_1"), "ns_Worker"))
        # Something of a worker is still there.
        marks = mark({DEVICES_VARIABLE: inventory.machine_names([0])[0]})
        assert await holding.hold_claimed(0.0) == {}
        assert (_free(inventory, 0), _free(inventory, 1)) == (False, True)
        _close(marks)
        assert await holding.hold_claimed(0.0) == {}
        assert _free(inventory, 0)
    _close(others)


def _free(inventory: Inventory, device_id: int) -> bool:
    try:
        _close(somebody_else(inventory, device_id))
    except DeviceError:
        return False
    return True


async def test_a_server_tells_who_asks_whose_it_is(inventory: Inventory) -> None:
    with DeviceHolds("ns") as holds:
        holds.take(inventory.machine_names([1]))
        (holder,) = (await asyncio.to_thread(held_elsewhere, inventory, os.getppid())).values()
    assert (holder.pid, holder.namespace) == (os.getpid(), "ns")


@pytest.mark.parametrize(("virtual", "usable"), [(False, 2), (True, 3)])
def test_the_planner_counts_what_is_left_to_its_server(
    tmp_path: Path, inventory: Inventory, virtual: bool, usable: int
) -> None:
    launch = launched(tmp_path, inventory, virtual=virtual)
    blueprint = Blueprint("7:3:1", "/", inventory, launch.templates, 1.0, 1.0)
    # Its own, and that of another one.
    bound = somebody_else(inventory, 0, 2)
    state = claim(new_state("ns", "ipc://x", "gpu", this_process()), "ns_Worker", role="decode", cmd="w", devices=[0])
    assert usable_devices(blueprint, state) == usable
    assert list(held_by_others(blueprint, state)) == ([] if virtual else [2])
    _close(bound)


def test_a_revisions_workers_hold_devices_by_their_own_template(tmp_path: Path, inventory: Inventory) -> None:
    """Mockers of the graph, and real workers of an endpoint, whose service has the same name."""
    (own, *_) = launched(tmp_path, inventory, virtual=True).templates
    theirs = msgspec.structs.replace(own, virtual=False, revision="chat@1")
    state = claim(new_state("ns", "ipc://x", "gpu", this_process()), "ns_Worker", role="decode", cmd="w", devices=[0])
    state = claim(state, "ns_chat@1_Worker", role="decode", cmd="w", devices=[1])
    assert list(names_in_use(state, (own, theirs), inventory).values()) == [1]
    assert names_in_use(state, (own,), inventory) == {}
