from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn

import pytest

from dynamo_local.core.errors import DeviceError
from state.devices.allocation import Device, Inventory, allocate, cpu_slots
from state.devices.gone import DeviceSources, gone_devices, online_cores, parse_cores
from state.devices.inventory import load_nvml, usable_cores
from tests.unit.state.devices.fake_nvml import AnyNvmlError, DriverNotLoadedError, LibraryNotFoundError


class NotFoundError(AnyNvmlError):
    pass


class GpuIsLostError(AnyNvmlError):
    pass


class ResetRequiredError(AnyNvmlError):
    pass


@dataclass
class NvmlWithFaults:
    """An NVML binding of which some GPUs do not answer. `unlisted` and `mute`: errors by UUID."""

    at_init: AnyNvmlError | None = None
    unlisted: dict[str, AnyNvmlError] = field(default_factory=dict)
    mute: dict[str, AnyNvmlError] = field(default_factory=dict)

    NVMLError: type[Exception] = AnyNvmlError
    NVMLError_LibraryNotFound: type[Exception] = LibraryNotFoundError
    NVMLError_DriverNotLoaded: type[Exception] = DriverNotLoadedError
    NVMLError_NotFound: type[Exception] = NotFoundError
    NVMLError_GpuIsLost: type[Exception] = GpuIsLostError
    NVMLError_ResetRequired: type[Exception] = ResetRequiredError

    def nvmlInit(self) -> None:  # noqa: N802
        if self.at_init is not None:
            raise self.at_init

    def nvmlShutdown(self) -> NoReturn:  # noqa: N802
        raise AnyNvmlError("Unknown")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> object:  # noqa: N802
        if uuid in self.unlisted:
            raise self.unlisted[uuid]
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle: object) -> object:  # noqa: N802
        assert isinstance(handle, str)
        if handle in self.mute:
            raise self.mute[handle]
        return object()


GPUS = Inventory("gpu", tuple(Device(number, "gpu", "H200", uuid=f"GPU-{number}") for number in range(3)))


def gone(nvml: NvmlWithFaults | None) -> dict[int, str]:
    return gone_devices(GPUS, DeviceSources(nvml=lambda: nvml))


def test_all_are_there() -> None:
    assert gone(NvmlWithFaults()) == {}


def test_gpus_that_are_lost_are_told_from_those_that_answer() -> None:
    nvml = NvmlWithFaults(unlisted={"GPU-0": NotFoundError("Not Found")}, mute={"GPU-2": GpuIsLostError("GPU is lost")})
    assert gone(nvml) == {0: "NVML says: Not Found", 2: "NVML says: GPU is lost"}


def test_without_a_driver_all_are_gone() -> None:
    assert gone(NvmlWithFaults(DriverNotLoadedError("Driver Not Loaded"))).keys() == {0, 1, 2}


@pytest.mark.parametrize(
    "nvml",
    [None, NvmlWithFaults(AnyNvmlError("Unknown")), NvmlWithFaults(mute={"GPU-1": AnyNvmlError("Timeout")})],
    ids=["no binding", "no answer", "no answer of one"],
)
def test_what_is_not_known_is_not_gone(nvml: NvmlWithFaults | None) -> None:
    assert gone(nvml) == {}


def test_a_slot_with_a_core_that_is_offline_is_gone() -> None:
    slots = cpu_slots(range(4), 2)
    assert gone_devices(slots, DeviceSources(online=lambda: {0, 1, 3})) == {1: "offline: 2"}
    assert gone_devices(slots, DeviceSources(online=lambda: None)) == {}


def test_lists_of_cores() -> None:
    assert parse_cores("0-2,5\n") == {0, 1, 2, 5}
    online = online_cores()
    assert online is None or set(usable_cores()) <= set(online)


def test_the_binding_has_the_errors_that_are_asked_for() -> None:
    nvml = load_nvml()
    if nvml is None:
        pytest.skip("nvidia-ml-py is not installed")
    asked = [name for name in NvmlWithFaults.__annotations__ if name.startswith("NVMLError")]
    assert [name for name in asked if not hasattr(nvml, name)] == []


def test_what_is_gone_is_not_handed_out() -> None:
    left = GPUS.lacking({0: "NVML says: GPU is lost"})
    assert allocate(left, {1: 1.0}, 1) == (2,)
    with pytest.raises(DeviceError) as caught:
        allocate(left, {}, 3, "chat")
    assert caught.value.cause == ("chat needs 3 devices, 2 of 3 GPUs are free; GPU 0 is gone (NVML says: GPU is lost)")
    assert "nvidia-smi" in (caught.value.remedy or "")
    with pytest.raises(DeviceError, match="GPU 0 is gone"):
        allocate(left, {1: 1.0, 2: 0.8}, 1, share=0.5)
