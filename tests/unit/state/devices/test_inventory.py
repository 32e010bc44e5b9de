from __future__ import annotations

import os

import pytest

from dynamo_local.core.errors import DeviceError
from state.devices.inventory import Machine, load_nvml, probe, usable_cores
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
