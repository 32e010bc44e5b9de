from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from state.devices.allocation import cpu_slots
from state.machine.cores import cores_beside


@given(st.sets(st.integers(0, 63), min_size=1, max_size=24), st.integers(1, 12), st.data())
def test_never_a_decoding_core_but_where_there_is_no_other(cores: set[int], slots: int, data: st.DataObject) -> None:
    inventory = cpu_slots(sorted(cores), slots)
    decoding = data.draw(st.sets(st.sampled_from(inventory.ids)))
    taken = {core for device_id in decoding for core in inventory.device(device_id).cores}
    left = cores_beside(inventory, cores, decoding)
    assert left == (cores if taken == cores else cores - taken)


def test_with_one_worker_on_each_core_all_share_all() -> None:
    assert cores_beside(cpu_slots((0, 1), 2), {0, 1}, (0, 1)) == {0, 1}


def test_a_slot_that_only_prefills_is_shared() -> None:
    assert cores_beside(cpu_slots((0, 1), 2), {0, 1}, (0,)) == {1}
