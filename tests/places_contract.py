"""What every place can do (supervisor/places/port.py): the same tests for each, over a `Site` of its own.

A subclass of `PlacesContract` gives the fixture `site`.
"""

from __future__ import annotations

import asyncio
from typing import Literal, Protocol

import pytest
from msgspec.structs import replace

from dynamo_local.core.errors import DeviceError, DynamoError, SupervisorError
from dynamo_local.core.names import Watcher
from dynamo_local.supervisor.places.local import Books
from dynamo_local.supervisor.places.port import Need, Places, Slot
from dynamo_local.supervisor.server.launch.templates import WatcherPlan
from state.statefile.transitions import add_template, claim, release

NAMESPACE = "dynamo"
DEVICES = 4
"""Devices of all nodes of a site together."""

Program = Literal["runs", "dies", "stubborn"]
"""`runs`: until it is told to end. `dies`: at once, with the error "no memory". `stubborn`: until it is killed."""

ONE = Need("decode", 1)


class Site(Protocol):
    """Places of `DEVICES` devices together, where nothing runs. `books`: the graph's statefile."""

    places: Places
    books: Books

    def plan(self, watcher: Watcher, slot: Slot, program: Program) -> WatcherPlan:
        """A plan for a process of that kind."""

    async def begun(self, name: str) -> None:
        """Wait until the watcher's process does what its program says."""

    def pids(self, name: str) -> tuple[int, ...]:
        """The watcher's processes that run."""

    async def lose(self) -> None:
        """From now on no place answers. What runs there goes on."""


def worker(index: int = 0) -> Watcher:
    return Watcher(NAMESPACE, "VllmWorker", index)


async def reserved(site: Site, index: int = 0, need: Need = ONE) -> Slot:
    if index > 0:
        # The entry that a service leaves when its processes are gone.
        await site.books.update(lambda state: add_template(state, worker(), need.role))
    return await site.places.reserve(worker(index), need)


async def claimed(site: Site, index: int = 0, program: Program = "runs") -> tuple[Slot, WatcherPlan]:
    reservation = await reserved(site, index)
    plan = site.plan(worker(index), reservation, program)
    await site.books.update(
        lambda state: claim(
            state,
            plan.watcher,
            role=plan.role,
            cmd="run",
            devices=reservation.devices,
            phase="starting",
            node=reservation.node,
        )
    )
    return reservation, plan


async def started(site: Site, index: int = 0, program: Program = "runs") -> Slot:
    reservation, plan = await claimed(site, index, program)
    await site.places.start(plan)
    await site.begun(plan.name)
    return reservation


async def unclaim(site: Site, index: int = 0) -> None:
    await site.books.update(lambda state: release(state, worker(index)))
    await site.places.release(str(worker(index)))


async def until_stopped(site: Site, name: str) -> None:
    async with asyncio.timeout(60):
        while (await site.places.statuses()).get(name) == "active":  # noqa: ASYNC110
            await asyncio.sleep(0.02)  # a place tells when it is asked


class PlacesContract:
    """Reservation first, claim second, process third; and backwards."""

    async def test_places_have_their_devices(self, site: Site) -> None:
        places = await site.places.places()
        assert sum(len(place.inventory.devices) for place in places.values()) == DEVICES
        assert {place.node for place in places.values()} == set(places)

    async def test_a_device_is_reserved_once(self, site: Site) -> None:
        found = [await reserved(site, index) for index in range(DEVICES)]
        assert len({(one.node, *one.devices) for one in found}) == DEVICES
        with pytest.raises(DeviceError, match="VllmWorker needs 1 device"):
            await reserved(site, DEVICES)
        assert await self.reservations(site) == {str(worker(index)) for index in range(DEVICES)}

    async def test_a_device_is_reserved_once_also_at_the_same_time(self, site: Site) -> None:
        await reserved(site)
        asked = [reserved(site, index) for index in range(1, DEVICES + 3)]
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert len({(one.node, *one.devices) for one in found if isinstance(one, Slot)}) == DEVICES - 1
        assert sum(isinstance(one, DeviceError) for one in found) == 3

    async def test_all_devices_of_a_process_are_on_one_node(self, site: Site) -> None:
        size = min(len(place.inventory.devices) for place in (await site.places.places()).values())
        reservation = await reserved(site, need=Need("decode", size))
        assert len(set(reservation.devices)) == size
        assert set(reservation.devices) <= set((await site.places.places())[reservation.node].inventory.ids)

    async def test_more_than_a_node_has_is_refused(self, site: Site) -> None:
        with pytest.raises(DeviceError, match=f"needs {DEVICES + 1} devices"):
            await reserved(site, need=Need("decode", DEVICES + 1))
        assert await self.reservations(site) == set()

    async def test_a_node_that_is_decided_is_the_only_one(self, site: Site) -> None:
        index = 0
        for node, place in (await site.places.places()).items():
            for _ in place.inventory.devices:
                assert (await reserved(site, index, replace(ONE, node=node))).node == node
                index += 1
            with pytest.raises(DeviceError):
                await reserved(site, DEVICES, replace(ONE, node=node))
        await site.places.release(str(worker()))
        with pytest.raises(DeviceError):
            await reserved(site, 0, replace(ONE, node="nowhere"))
        assert str(worker()) not in await self.reservations(site)

    async def test_shares_are_of_one_device(self, site: Site) -> None:
        first, second = [await reserved(site, index, Need("decode", 1, 0.5)) for index in range(2)]
        assert (first.node, first.devices) == (second.node, second.devices)
        third = await reserved(site, 2, Need("decode", 1, 0.6))
        assert (third.node, third.devices) != (first.node, first.devices)

    async def test_a_watcher_has_one_reservation(self, site: Site) -> None:
        await reserved(site)
        with pytest.raises(DynamoError, match="already"):
            await reserved(site)
        assert await self.reservations(site) == {str(worker())}

    async def test_a_reservation_tells_whose_it_is_until_it_is_claimed_or_released(self, site: Site) -> None:
        await reserved(site, 1)
        await claimed(site, 2)
        assert await self.reservations(site) == {str(worker(1))}
        await site.places.release(str(worker(1)))
        assert await self.reservations(site) == set()

    async def test_nothing_starts_without_a_reservation(self, site: Site) -> None:
        reservation = await reserved(site)
        plan = site.plan(worker(), reservation, "runs")
        await site.places.release(plan.name)
        with pytest.raises(SupervisorError, match="reserve"):
            await site.places.start(plan)
        assert plan.name not in await site.places.statuses()

    async def test_to_start_what_runs_is_harmless(self, site: Site) -> None:
        _, plan = await claimed(site)
        await site.places.start(plan)
        await site.begun(plan.name)
        pids = site.pids(plan.name)
        await site.places.start(plan)
        assert len(pids) == 1
        assert site.pids(plan.name) == pids
        assert (await site.places.statuses())[plan.name] == "active"

    async def test_an_end_is_awaited_and_can_be_repeated(self, site: Site) -> None:
        await started(site)
        await site.places.end(str(worker()), 30.0)
        assert site.pids(str(worker())) == ()
        assert str(worker()) not in await site.places.statuses()
        await site.places.end(str(worker()), 30.0)

    async def test_what_does_not_end_is_killed(self, site: Site) -> None:
        await started(site, program="stubborn")
        await site.places.end(str(worker()), 0.1)
        assert site.pids(str(worker())) == ()

    async def test_devices_are_free_after_the_end_and_the_release(self, site: Site) -> None:
        found = [await started(site, index) for index in range(DEVICES)]
        await site.places.end(str(worker(1)), 30.0)
        with pytest.raises(DeviceError):
            await reserved(site, DEVICES)
        await unclaim(site, 1)
        await site.places.release(str(worker(1)))
        again = await reserved(site, DEVICES)
        assert (again.node, again.devices) == (found[1].node, found[1].devices)

    async def test_what_runs_is_not_released(self, site: Site) -> None:
        await started(site)
        with pytest.raises(SupervisorError, match="end it first"):
            await site.places.release(str(worker()))
        assert site.pids(str(worker())) != ()

    async def test_a_process_that_has_ended_is_stopped_and_says_why(self, site: Site) -> None:
        await started(site)
        await started(site, 1, "dies")
        await until_stopped(site, str(worker(1)))
        assert dict(await site.places.statuses()) == {str(worker()): "active", str(worker(1)): "stopped"}
        assert await site.places.last_error(str(worker(1))) == "no memory"

    async def test_a_process_that_has_ended_can_be_started_again(self, site: Site) -> None:
        _, plan = await claimed(site)
        await site.places.start(plan)
        await site.begun(plan.name)
        await site.places.end(plan.name, 30.0)
        assert site.pids(plan.name) == ()
        await site.places.start(plan)
        async with asyncio.timeout(60):
            while not site.pids(plan.name):  # noqa: ASYNC110
                await asyncio.sleep(0.02)  # its log says that it has begun, from the first time on

    async def test_the_last_lines_of_a_log_are_told(self, site: Site) -> None:
        await started(site, program="dies")
        await until_stopped(site, str(worker()))
        part = await site.places.log(str(worker()), 1)
        assert part.lines == ("error: no memory",)
        assert (await site.places.log(str(worker()), 5, after=part.end)).lines == ()
        # circus starts one once more that has ended before it is looked at.
        assert set((await site.places.log(str(worker()), 5, after=0)).lines) == set(part.lines)

    async def test_unknown_is_not_stopped(self, site: Site) -> None:
        await started(site)
        await site.lose()
        try:
            found = dict(await site.places.statuses())
        except SupervisorError:
            pass  # If no place answers, all is unknown.
        else:
            assert found == {str(worker()): "unknown"}
        with pytest.raises(SupervisorError):
            await site.places.release(str(worker()))
        assert site.pids(str(worker())) != ()
        assert (await site.books.read()).components[str(worker())].holds

    async def reservations(self, site: Site) -> set[str]:
        return {name for place in (await site.places.places()).values() for name in place.reserved}
