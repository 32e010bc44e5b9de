"""Which of a server's devices are not there any more: GPUs that the driver has lost, cores that are offline.

Only what is certain counts: a question that fails for another reason leaves the device where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from state.devices.allocation import Device, Inventory
from state.devices.inventory import load_nvml

_ONLINE = Path("/sys/devices/system/cpu/online")


class NvmlOfDevices(Protocol):
    """The part of the module `pynvml` that is used here."""

    NVMLError: type[Exception]
    NVMLError_LibraryNotFound: type[Exception]
    NVMLError_DriverNotLoaded: type[Exception]
    NVMLError_NotFound: type[Exception]
    NVMLError_GpuIsLost: type[Exception]
    NVMLError_ResetRequired: type[Exception]

    # Names are the library's.
    def nvmlInit(self) -> None: ...  # noqa: N802
    def nvmlShutdown(self) -> None: ...  # noqa: N802
    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> object: ...  # noqa: N802
    def nvmlDeviceGetMemoryInfo(self, handle: object) -> object: ...  # noqa: N802


def _load() -> NvmlOfDevices | None:
    return cast("NvmlOfDevices | None", load_nvml())


def online_cores() -> Collection[int] | None:
    """The cores that the kernel runs processes on; None if that cannot be read."""
    try:
        return parse_cores(_ONLINE.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def parse_cores(text: str) -> frozenset[int]:
    """Parse a list of the kernel's, such as "0-3,6". Raises ValueError."""
    ranges = (part.partition("-") for part in text.strip().split(","))
    return frozenset(core for first, _, last in ranges for core in range(int(first), int(last or first) + 1))


@dataclass(frozen=True)
class DeviceSources:
    """The sources of `gone_devices`. By default those of this machine."""

    nvml: Callable[[], NvmlOfDevices | None] = _load
    online: Callable[[], Collection[int] | None] = online_cores


_THIS_MACHINE = DeviceSources()


def gone_devices(inventory: Inventory, sources: DeviceSources = _THIS_MACHINE) -> dict[int, str]:
    """The devices that are gone, by id, each with the reason. Blocks: a driver may take a tenth of a second."""
    if inventory.kind == "gpu":
        return _lost_gpus(inventory.devices, sources.nvml())
    online = sources.online()
    if online is None:
        return {}
    offline = {device.id: sorted(set(device.cores) - set(online)) for device in inventory.devices}
    return {number: f"offline: {', '.join(map(str, cores))}" for number, cores in offline.items() if cores}


def _lost_gpus(gpus: Collection[Device], nvml: NvmlOfDevices | None) -> dict[int, str]:
    if nvml is None or not gpus:
        return {}
    try:
        nvml.nvmlInit()
    except (nvml.NVMLError_LibraryNotFound, nvml.NVMLError_DriverNotLoaded) as error:
        return {gpu.id: _told(error) for gpu in gpus}
    except nvml.NVMLError:
        return {}
    try:
        found = {gpu.id: _why_lost(gpu, nvml) for gpu in gpus}
    finally:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
    return {number: why for number, why in found.items() if why}


def _why_lost(gpu: Device, nvml: NvmlOfDevices) -> str:
    """Why the GPU cannot be used any more; empty if it can, or that is not known."""
    try:
        # A GPU that has fallen off the bus may still be listed: it answers nothing.
        nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByUUID(gpu.uuid))
    except (nvml.NVMLError_NotFound, nvml.NVMLError_GpuIsLost, nvml.NVMLError_ResetRequired) as error:
        return _told(error)
    except nvml.NVMLError:
        return ""
    return ""


def _told(error: Exception) -> str:
    return f"NVML says: {error}"
