from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.errors import DeviceError
from state.devices.allocation import Device
from state.devices.inventory import visible_gpus


def gpu(index: int, uuid: str, name: str = "H200") -> Device:
    return Device(index, "gpu", name, uuid=uuid)


ALIKE = (gpu(0, "GPU-aa11"), gpu(1, "GPU-aa22"), gpu(2, "GPU-bb33"))
UNLIKE = (gpu(0, "GPU-aa11", "T4"), gpu(1, "GPU-bb22", "H200"))


def ids(setting: str) -> list[int]:
    return [gpu.id for gpu in visible_gpus(ALIKE, {"CUDA_VISIBLE_DEVICES": setting})]


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("", []),
        ("  ", []),
        ("-1", []),
        ("0", [0]),
        ("2,0", [0, 2]),
        (" 1 , 2 ", [1, 2]),
        ("0,2,-1,1", [0, 2]),
        ("GPU-aa22", [1]),
        ("GPU-b", [2]),
        ("GPU-aa11,1", [0, 1]),
    ],
)
def test_what_a_setting_leaves(setting: str, expected: list[int]) -> None:
    assert ids(setting) == expected


def test_unset_leaves_all() -> None:
    assert visible_gpus(ALIKE, {}) == ALIKE


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("MIG-4f2e", "names the MIG slice MIG-4f2e"),
        ("0,MIG-GPU-aa11/1/0", "MIG slice"),
        ("3", "'3' in CUDA_VISIBLE_DEVICES is none of"),
        ("GPU-aa", "'GPU-aa' in CUDA_VISIBLE_DEVICES is the beginning of several"),
        ("GPU-zz", "is none of"),
        ("all", "'all' in"),
        ("0,,1", "'' in"),
        ("0;1", "'0;1' in"),
        ("²", "is none of"),
        ("9" * 5000, "is none of"),
        ("0,0", "names a GPU twice"),
        ("0,GPU-aa11", "names a GPU twice"),
    ],
)
def test_a_setting_that_makes_no_sense_is_named(setting: str, problem: str) -> None:
    with pytest.raises(DeviceError, match=problem) as caught:
        ids(setting)
    assert caught.value.remedy


@given(st.text(alphabet="01234-,GPUMIabx ", max_size=12))
def test_any_setting_gives_known_gpus_or_a_device_error(setting: str) -> None:
    try:
        found = visible_gpus(ALIKE, {"CUDA_VISIBLE_DEVICES": setting})
    except DeviceError:
        return
    assert list(found) == [gpu for gpu in ALIKE if gpu in found]


def test_an_index_among_unlike_gpus_needs_the_order() -> None:
    with pytest.raises(DeviceError, match=r"ambiguous.*set CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        visible_gpus(UNLIKE, {"CUDA_VISIBLE_DEVICES": "0"})
    in_order = {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert visible_gpus(UNLIKE, in_order) == UNLIKE[:1]
    assert visible_gpus(UNLIKE, {"CUDA_VISIBLE_DEVICES": "GPU-bb"}) == UNLIKE[1:]
    assert visible_gpus(UNLIKE, {"CUDA_VISIBLE_DEVICES": "1,0"}) == UNLIKE


def test_without_gpus_the_setting_does_not_matter() -> None:
    assert visible_gpus((), {"CUDA_VISIBLE_DEVICES": "7"}) == ()
