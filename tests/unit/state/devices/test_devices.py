from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.errors import DeviceError
from state.devices.allocation import Device, Inventory, allocate, cpu_slots, environment_for, threads_for

IDS = st.lists(st.integers(0, 31), unique=True, max_size=12).map(sorted)
CORES = st.sets(st.integers(0, 63), min_size=1, max_size=24).map(sorted)


def gpus(*ids: int) -> Inventory:
    return Inventory("gpu", tuple(Device(i, "gpu", "A GPU", uuid=f"GPU-{i}") for i in ids))


@given(IDS, st.dictionaries(st.integers(0, 40), st.sampled_from([0.1, 0.5, 1])), st.integers(0, 14))
def test_allocation_takes_the_lowest_free_ids_or_raises(ids: list[int], taken: dict[int, float], count: int) -> None:
    free = [device for device in ids if device not in taken]
    if count > len(free):
        with pytest.raises(DeviceError):
            allocate(gpus(*ids), taken, count)
    else:
        assert allocate(gpus(*ids), taken, count) == tuple(free[:count])


@given(IDS, st.lists(st.integers(0, 4), max_size=10))
def test_a_series_of_allocations_never_over_subscribes(ids: list[int], wishes: list[int]) -> None:
    taken: list[int] = []
    for count in wishes:
        try:
            given_out = allocate(gpus(*ids), dict.fromkeys(taken, 1), count)
        except DeviceError:
            assert len(taken) + count > len(ids)
            continue
        assert len(given_out) == count
        taken.extend(given_out)
    assert len(taken) == len(set(taken)) <= len(ids)
    assert set(taken) <= set(ids)


def message(inventory: Inventory, taken: set[int], count: int) -> str:
    with pytest.raises(DeviceError) as caught:
        allocate(inventory, dict.fromkeys(taken, 1), count, needed_by="VllmWorker")
    assert caught.value.remedy
    return caught.value.cause


def test_a_shortage_says_who_needs_what_and_what_there_is() -> None:
    slots = cpu_slots([0, 1], 2)
    assert message(slots, {0}, 2) == "VllmWorker needs 2 devices, 1 of 2 CPU slots is free"
    assert message(slots, set(), 3) == "VllmWorker needs 3 devices, 2 of 2 CPU slots are free"
    assert message(gpus(0), {0}, 1) == "VllmWorker needs 1 device, 0 of 1 GPU are free"
    assert message(gpus(), set(), 1) == "VllmWorker needs 1 device, there is no GPU"
    assert message(gpus(0), set(), -1) == "VllmWorker asks for -1 devices"


def test_gpus_are_named_by_index_in_pci_order() -> None:
    assert environment_for(gpus(0, 2, 5), (2, 5)) == {
        "CUDA_VISIBLE_DEVICES": "2,5",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }


def test_a_process_without_a_gpu_sees_none() -> None:
    assert environment_for(gpus(0), ())["CUDA_VISIBLE_DEVICES"] == ""
    assert environment_for(cpu_slots([0], 1), (0,))["CUDA_VISIBLE_DEVICES"] == ""


def test_slots_become_cores() -> None:
    assert environment_for(cpu_slots([0, 1, 2, 3], 2), (1,))["DYN_CPU_CORES"] == "2,3"
    assert environment_for(cpu_slots([4, 6], 4), (0, 2))["DYN_CPU_CORES"] == "4|4"
    assert "DYN_CPU_CORES" not in environment_for(cpu_slots([0], 1), ())


def test_a_cpu_slot_has_as_many_threads_as_cores() -> None:
    assert threads_for(cpu_slots([0, 1, 2, 3], 2), (1,)) == {"OMP_NUM_THREADS": "2"}
    assert threads_for(cpu_slots([4, 6], 4), (0, 2)) == {"OMP_NUM_THREADS": "1"}
    assert threads_for(cpu_slots([0], 1), ()) == {}


def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(DeviceError, match="no GPU 7; ids are 0, 2"):
        environment_for(gpus(0, 2), (7,))


@given(CORES, st.integers(1, 40))
def test_slots_cover_the_cores_evenly(cores: list[int], count: int) -> None:
    slots = cpu_slots(cores, count)
    assert slots.ids == tuple(range(count))
    lengths = [len(device.cores) for device in slots.devices]
    assert max(lengths) - min(lengths) <= 1
    flat = [core for device in slots.devices for core in device.cores]
    if count <= len(cores):
        assert flat == cores
    else:
        assert flat == [cores[index % len(cores)] for index in range(count)]


@pytest.mark.parametrize(("cores", "count"), [([], 1), ([0], 0), ([0], -1)])
def test_slots_of_nothing_are_refused(cores: list[int], count: int) -> None:
    with pytest.raises(DeviceError, match="cannot make"):
        cpu_slots(cores, count)


def test_an_inventory_is_ordered_distinct_and_of_one_kind() -> None:
    for ids in ((1, 0), (0, 0)):
        with pytest.raises(DeviceError, match="distinct and ascending"):
            gpus(*ids)
    with pytest.raises(DeviceError, match="another kind"):
        Inventory("cpu-slot", gpus(0).devices)
