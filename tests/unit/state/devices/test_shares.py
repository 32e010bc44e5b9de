"""Shares of devices add up to at most 1, and never take a device from a worker that needs a whole one for nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dynamo_local.core.errors import DeviceError, StateError
from dynamo_local.core.shares import fits, held, shown_devices, summed, times_in_one
from state.devices.allocation import Inventory, allocate, cpu_slots, threads_for
from state.statefile.model import State, decode, encode
from state.statefile.transitions import claim, next_watcher, release, shares_taken
from tests.unit.state.builders import empty_state

SHARES = st.sampled_from([1.0, 0.1, 0.2, 0.25, 0.3, 1 / 3, 0.333333, 0.5, 0.7, 2 / 3, 0.01, 0.99])
SLOTS = cpu_slots(range(8), 4)


def put(state: State, devices: tuple[int, ...], share: float, service: str = "VllmWorker") -> State:
    watcher = next_watcher(state, service)
    return claim(state, watcher, role="worker", cmd="run", devices=devices, share=share)


@pytest.mark.parametrize(("share", "times"), [(0.1, 10), (1 / 3, 3), (0.333333, 3), (0.5, 2), (0.7, 1), (0.01, 100)])
def test_a_device_has_room_for_its_parts_whatever_their_dust(share: float, times: int) -> None:
    state = empty_state()
    for _ in range(times):
        state = put(state, allocate(cpu_slots([0], 1), shares_taken(state), 1, share=share), share)
    assert shares_taken(state) == {0: pytest.approx(times * share, abs=1e-6)}
    assert times_in_one(share) == times
    with pytest.raises(DeviceError, match="of a device, no CPU slot of 1 has as much room"):
        allocate(cpu_slots([0], 1), shares_taken(state), 1, share=share)
    with pytest.raises(StateError, match="device 0 is held by both"):
        put(state, (0,), share)


def test_a_share_is_put_where_the_least_room_is_enough() -> None:
    def found(taken: Mapping[int, float], share: float) -> tuple[int, ...]:
        return allocate(SLOTS, taken, 1, share=share)

    assert found({}, 0.5) == (0,)
    assert found({1: 0.5}, 0.5) == (1,)
    assert found({1: 0.2, 2: 0.5, 3: 0.7}, 0.3) == (3,)
    assert found({1: 0.2, 2: 0.5, 3: 0.7}, 0.4) == (2,)
    assert found({0: 1, 1: 0.5, 2: 0.5}, 0.5) == (1,)
    assert found({0: 0.7, 1: 0.1 + 0.2, 2: 0.3}, 0.5) == (1,)


def test_a_whole_device_is_one_of_which_nothing_is_taken() -> None:
    assert allocate(SLOTS, {0: 0.01, 2: 1}, 2) == (1, 3)
    with pytest.raises(DeviceError, match="needs 3 devices, 2 of 4 CPU slots are free"):
        allocate(SLOTS, {0: 0.01, 2: 1}, 3)


def test_a_device_of_another_server_is_not_shared_with_it() -> None:
    others = {0: "the server of namespace b"}
    assert allocate(SLOTS, {}, 1, elsewhere=others, share=0.5) == (1,)
    with pytest.raises(DeviceError, match="no CPU slot of 1 has as much room; CPU slot 0 is held by the server"):
        allocate(cpu_slots([0], 1), {}, 1, elsewhere=others, share=0.5)
    with pytest.raises(DeviceError, match="there is no GPU"):
        allocate(Inventory("gpu", ()), {}, 1, share=0.5)


@given(st.lists(SHARES, max_size=30), st.integers(1, 5))
def test_a_share_is_refused_only_where_no_device_has_room(wishes: list[float], count: int) -> None:
    slots = cpu_slots(range(count), count)
    taken: dict[int, float] = {}
    for share in wishes:
        roomy = {device for device in slots.ids if fits(taken.get(device, 0), share)}
        untouched = set(slots.ids) - set(taken)
        try:
            (found,) = allocate(slots, taken, 1, share=share)
        except DeviceError:
            assert not (untouched if share == 1 else roomy)
            continue
        assert found in roomy
        # A device that nobody uses is left alone where another one has room.
        assert share == 1 or found in taken or not roomy & set(taken)
        taken[found] = summed([taken.get(found, 0), share])
        assert fits(taken[found], 0)


class Claims(RuleBasedStateMachine):
    """Any series of claims and releases, of whole devices and of shares."""

    def __init__(self) -> None:
        super().__init__()
        self.state = empty_state()
        self.held: dict[str, tuple[tuple[int, ...], float]] = {}

    @rule(service=st.sampled_from(["VllmWorker", "PrefillWorker"]), share=SHARES, count=st.integers(1, 3))
    def add(self, service: str, share: float, count: int) -> None:
        number = count if share == 1 else 1
        try:
            devices = allocate(SLOTS, shares_taken(self.state), number, share=share)
        except DeviceError:
            return
        # The same claims give the same devices, also to a server that has read the statefile anew.
        assert devices == allocate(SLOTS, shares_taken(decode(encode(self.state))), number, share=share)
        name = str(next_watcher(self.state, service))
        self.state = put(self.state, devices, share, service)
        self.held[name] = (devices, share)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.held)))
        self.state = release(self.state, name)
        del self.held[name]

    @invariant()
    def nothing_is_over_subscribed(self) -> None:
        by_device: dict[int, list[float]] = {}
        for devices, share in self.held.values():
            for device in devices:
                by_device.setdefault(device, []).append(share)
        for shares in by_device.values():
            assert sum(shares) <= 1 + 1e-5
            assert 1.0 not in shares or len(shares) == 1
        assert shares_taken(self.state) == {device: summed(shares) for device, shares in by_device.items()}
        total = sum(component.device_count for component in self.state.components.values())
        assert total == pytest.approx(sum(held(len(devices), share) for devices, share in self.held.values()))


TestClaims = Claims.TestCase


def test_the_statefile_has_shares_only_where_there_are_some() -> None:
    document = json.loads(encode(put(put(empty_state(), (0,), 1.0), (1,), 0.5)))
    assert document["components"]["dynamo_VllmWorker"]["resources"] == {"allocated_gpus": [0]}
    assert document["components"]["dynamo_VllmWorker_1"]["resources"] == {"allocated_gpus": [1], "share": 0.5}


@pytest.mark.parametrize("share", [0, -0.5, 1.5, 0.001, "half"])
def test_a_share_that_is_none_is_not_read(share: float) -> None:
    document = json.loads(encode(put(empty_state(), (1,), 0.5)))
    document["components"]["dynamo_VllmWorker"]["resources"]["share"] = share
    with pytest.raises(StateError, match="not a statefile"):
        decode(msgspec.json.encode(document))


def test_workers_on_one_slot_divide_its_cores() -> None:
    slots = cpu_slots(range(4), 1)
    assert threads_for(slots, (0,), 0.5) == {"OMP_NUM_THREADS": "2"}
    assert threads_for(slots, (0,), 0.75) == {"OMP_NUM_THREADS": "3"}
    assert threads_for(slots, (0,), 0.1) == {"OMP_NUM_THREADS": "1"}
    assert threads_for(cpu_slots(range(3), 1), (0,), 1 / 3) == {"OMP_NUM_THREADS": "1"}


def test_devices_are_shown_with_their_share() -> None:
    assert shown_devices((0, 1)) == "0,1"
    assert shown_devices((3,), 0.5) == "3 (0.5)"
    assert shown_devices((), 1.0) == ""
