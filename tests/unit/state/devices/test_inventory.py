from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import NoReturn

import pytest

from dynamo_local.core.errors import DeviceError
from state.devices.allocation import Device, Inventory, allocate, cpu_slots
from state.devices.inventory import (
    DeviceSources,
    Machine,
    gone_devices,
    load_nvml,
    online_cores,
    parse_cores,
    probe,
    usable_cores,
)
from tests.unit.state.devices.fake_nvml import AnyNvmlError, DriverNotLoadedError, FakeNvml, Gpu, LibraryNotFoundError

TWO = (Gpu("GPU-aaaa-1"), Gpu("GPU-bbbb-2"))


def machine(nvml: FakeNvml | None, driver: bool = True, cores: int = 4) -> Machine:
    return Machine(nvml=lambda: nvml, driver_present=lambda: driver, cores=lambda: range(cores))


class TestGpus:
    def test_they_come_in_order_with_name_and_uuid(self) -> None:
        nvml = FakeNvml(TWO)
        inventory = probe(None, {}, machine(nvml))
        assert inventory.kind == "gpu"
        assert [(gpu.id, gpu.uuid) for gpu in inventory.devices] == [(0, "GPU-aaaa-1"), (1, "GPU-bbbb-2")]
        assert {gpu.name for gpu in inventory.devices} == {"NVIDIA H200"}
        assert not nvml.open

    def test_bindings_that_answer_bytes(self) -> None:
        inventory = probe(None, {}, machine(FakeNvml([Gpu(b"GPU-aaaa", b"Tesla T4")])))
        assert (inventory.devices[0].uuid, inventory.devices[0].name) == ("GPU-aaaa", "Tesla T4")

    def test_the_environment_restricts_them(self) -> None:
        inventory = probe(None, {"CUDA_VISIBLE_DEVICES": "1"}, machine(FakeNvml(TWO)))
        assert inventory.ids == (1,)

    def test_a_gpu_this_user_may_not_open_is_not_counted(self) -> None:
        """CUDA does not count it either: its index 0 is the first that can be opened."""
        nvml = FakeNvml([Gpu("GPU-denied", denied=True), *TWO])
        inventory = probe(None, {}, machine(nvml))
        assert [(gpu.id, gpu.uuid) for gpu in inventory.devices] == [(0, "GPU-aaaa-1"), (1, "GPU-bbbb-2")]

    def test_a_failing_shutdown_does_not_hide_them(self) -> None:
        assert len(probe(None, {}, machine(FakeNvml(TWO, at_shutdown=AnyNvmlError("Unknown")))).devices) == 2


class TestNoGpu:
    @pytest.mark.parametrize(
        "nvml",
        [
            None,
            FakeNvml(at_init=LibraryNotFoundError("NVML Shared Library Not Found")),
            FakeNvml(at_init=DriverNotLoadedError("Driver Not Loaded")),
            FakeNvml(gpus=()),
            FakeNvml(gpus=(Gpu("GPU-denied", denied=True),)),
        ],
        ids=["no binding", "no library", "no driver", "none installed", "none permitted"],
    )
    def test_there_is_one_slot_a_core(self, nvml: FakeNvml | None) -> None:
        inventory = probe(None, {}, machine(nvml, driver=False))
        assert inventory.kind == "cpu-slot"
        assert [device.cores for device in inventory.devices] == [(0,), (1,), (2,), (3,)]

    @pytest.mark.parametrize("setting", ["", "-1"])
    def test_hidden_gpus_leave_slots(self, setting: str) -> None:
        inventory = probe(None, {"CUDA_VISIBLE_DEVICES": setting}, machine(FakeNvml(TWO)))
        assert inventory.kind == "cpu-slot"


class TestUnknownIsNotZero:
    @pytest.mark.parametrize(
        "nvml",
        [
            FakeNvml(TWO, at_init=AnyNvmlError("Driver/library version mismatch")),
            FakeNvml(TWO, at_count=AnyNvmlError("Unknown Error")),
            FakeNvml([*TWO, Gpu("GPU-cccc", failing="handle")]),
            FakeNvml([*TWO, Gpu("GPU-cccc", failing="uuid")]),
            FakeNvml([*TWO, Gpu("GPU-cccc", failing="name")]),
        ],
        ids=["init", "count", "handle", "uuid", "name"],
    )
    def test_an_nvml_error_is_an_error(self, nvml: FakeNvml) -> None:
        with pytest.raises(DeviceError, match="NVML cannot") as caught:
            probe(None, {}, machine(nvml))
        assert isinstance(caught.value.__cause__, AnyNvmlError)
        assert caught.value.remedy
        assert not nvml.open

    @pytest.mark.parametrize("nvml", [None, FakeNvml(at_init=LibraryNotFoundError("Library Not Found"))])
    def test_a_driver_whose_gpus_cannot_be_listed_is_an_error(self, nvml: FakeNvml | None) -> None:
        with pytest.raises(DeviceError, match="there is an NVIDIA driver but"):
            probe(None, {}, machine(nvml, driver=True))


class TestSlots:
    def test_the_argument_counts_before_the_environment(self) -> None:
        assert len(probe(3, {"DYN_CPU_SLOTS": "2"}, machine(None, driver=False)).devices) == 3
        assert len(probe(None, {"DYN_CPU_SLOTS": "2"}, machine(None, driver=False)).devices) == 2

    def test_an_empty_setting_is_none(self) -> None:
        assert len(probe(None, {"DYN_CPU_SLOTS": " "}, machine(None, driver=False)).devices) == 4

    def test_asking_for_slots_leaves_gpus_alone(self) -> None:
        nvml = FakeNvml(TWO, at_init=AnyNvmlError("Unknown"))
        assert probe(None, {"DYN_CPU_SLOTS": "8"}, machine(nvml)).kind == "cpu-slot"
        assert nvml.calls == []

    @pytest.mark.parametrize("setting", ["0", "-1", "two", "1.5", "1025", "²", "9" * 5000])
    def test_a_senseless_setting_is_an_error(self, setting: str) -> None:
        with pytest.raises(DeviceError):
            probe(None, {"DYN_CPU_SLOTS": setting}, machine(None, driver=False))


def test_this_machine_has_cores_and_its_binding_the_names_we_use() -> None:
    assert set(usable_cores()) == os.sched_getaffinity(0)
    nvml = load_nvml()
    if nvml is None:
        pytest.skip("nvidia-ml-py is not installed")
    for name in ("NVMLError_LibraryNotFound", "NVMLError_DriverNotLoaded", "NVMLError_NoPermission"):
        assert issubclass(getattr(nvml, name), nvml.NVMLError)
    for call in ("Init", "Shutdown", "DeviceGetCount", "DeviceGetHandleByIndex", "DeviceGetUUID"):
        assert callable(getattr(nvml, f"nvml{call}"))


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
