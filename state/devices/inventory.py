"""Finds the devices of this machine: GPUs by NVML, else CPU slots.

"There is no GPU" gives CPU slots; "it could not be found out" is a DeviceError. NVML opens no CUDA context, so probing
costs no GPU memory, and later forks stay safe.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from dynamo_local.core.errors import DeviceError
from state.devices.allocation import CUDA_DEVICES_VARIABLE, CUDA_ORDER_VARIABLE, Device, Inventory, cpu_slots

CPU_SLOTS_VARIABLE = "DYN_CPU_SLOTS"
"""Number of CPU slots to run workers on, instead of GPUs or one slot per core; --cpu-slots takes precedence."""

MAX_CPU_SLOTS = 1024

_LOOK = "check that nvidia-smi works, or set DYN_CPU_SLOTS to run on CPU slots"


class Nvml(Protocol):
    """The part of the module `pynvml` (distribution nvidia-ml-py) that is used here."""

    NVMLError: type[Exception]
    NVMLError_LibraryNotFound: type[Exception]
    NVMLError_DriverNotLoaded: type[Exception]
    NVMLError_NoPermission: type[Exception]

    # Names are the library's.
    def nvmlInit(self) -> None: ...  # noqa: N802
    def nvmlShutdown(self) -> None: ...  # noqa: N802
    def nvmlDeviceGetCount(self) -> int: ...  # noqa: N802
    def nvmlDeviceGetHandleByIndex(self, index: int) -> object: ...  # noqa: N802
    def nvmlDeviceGetUUID(self, handle: object) -> str | bytes: ...  # noqa: N802
    def nvmlDeviceGetName(self, handle: object) -> str | bytes: ...  # noqa: N802


def load_nvml() -> Nvml | None:
    """The NVML binding, or None where it is not installed."""
    try:
        return cast(Nvml, import_module("pynvml"))
    except ModuleNotFoundError:
        return None


def driver_present() -> bool:
    """Whether this process can reach an NVIDIA driver. In a container without GPUs the device file is missing
    even when the host has some."""
    return Path("/dev/nvidiactl").exists()


def usable_cores() -> Sequence[int]:
    """The cores that this process may run on."""
    return sorted(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Machine:
    """The sources of `probe`. By default those of this machine."""

    nvml: Callable[[], Nvml | None] = load_nvml
    driver_present: Callable[[], bool] = driver_present
    cores: Callable[[], Sequence[int]] = usable_cores


THIS_MACHINE = Machine()


def probe(slots: int | None, environ: Mapping[str, str], machine: Machine = THIS_MACHINE) -> Inventory:
    """Find the devices that a server may give to its processes.

    `slots`, or else $DYN_CPU_SLOTS, asks for that many CPU slots, also on a machine with GPUs; they share cores with
    other programs. Otherwise the devices are the GPUs, restricted to $CUDA_VISIBLE_DEVICES where that is set. Where
    there is none, or all are hidden, each core is a CPU slot. Raises DeviceError for a setting that makes no sense, and
    when NVML fails for another reason than a missing library or driver.
    """
    wanted = slots if slots is not None else _slots_setting(environ)
    if wanted is not None:
        return cpu_slots(machine.cores(), _checked(wanted))
    gpus = visible_gpus(_gpus(machine), environ)
    if gpus:
        return Inventory("gpu", gpus)
    cores = machine.cores()
    return cpu_slots(cores, len(cores), exclusive=True)


def _slots_setting(environ: Mapping[str, str]) -> int | None:
    setting = environ.get(CPU_SLOTS_VARIABLE, "").strip()
    if not setting:
        return None
    if not (setting.isascii() and setting.isdigit() and len(setting) <= 9):
        raise DeviceError(f"{CPU_SLOTS_VARIABLE}={setting} makes no sense", f"set 1 to {MAX_CPU_SLOTS}")
    return int(setting)


def _checked(slots: int) -> int:
    if not 1 <= slots <= MAX_CPU_SLOTS:
        raise DeviceError(f"{slots} CPU slots were asked for", f"ask for 1 to {MAX_CPU_SLOTS}")
    return slots


def _gpus(machine: Machine) -> tuple[Device, ...]:
    """All GPUs that this process may use, in PCI order; empty only if it is certain that there is none."""
    nvml = machine.nvml()
    if nvml is None:
        _check_no_driver(machine, "package nvidia-ml-py is not installed")
        return ()
    try:
        nvml.nvmlInit()
    except (nvml.NVMLError_LibraryNotFound, nvml.NVMLError_DriverNotLoaded) as error:
        _check_no_driver(machine, f"NVML says: {error}")
        return ()
    except nvml.NVMLError as error:
        raise DeviceError(f"NVML cannot start: {error}", _LOOK) from error
    try:
        return _enumerate(nvml)
    finally:
        # Nothing depends on a clean shutdown, and its failure must not hide what was found.
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _check_no_driver(machine: Machine, finding: str) -> None:
    if machine.driver_present():
        raise DeviceError(f"there is an NVIDIA driver but its GPUs cannot be listed: {finding}", _LOOK)


def _enumerate(nvml: Nvml) -> tuple[Device, ...]:
    """List the GPUs that can be opened. An id is the position among these: NVML also counts GPUs that this user may not
    open, but CUDA does not, and the indices of CUDA_VISIBLE_DEVICES are CUDA's."""
    with _nvml_errors(nvml, "count the GPUs"):
        count = nvml.nvmlDeviceGetCount()
    found: list[Device] = []
    for index in range(count):
        with _nvml_errors(nvml, f"ask about GPU {index}"):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
            except nvml.NVMLError_NoPermission:
                continue
            uuid, name = _text(nvml.nvmlDeviceGetUUID(handle)), _text(nvml.nvmlDeviceGetName(handle))
            found.append(Device(len(found), "gpu", name, uuid=uuid))
    return tuple(found)


@contextmanager
def _nvml_errors(nvml: Nvml, doing: str) -> Iterator[None]:
    try:
        yield
    except nvml.NVMLError as error:
        raise DeviceError(f"NVML cannot {doing}: {error}", _LOOK) from error


def _text(value: str | bytes) -> str:
    """The text of an NVML answer, which is bytes in bindings before 11.5."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


# Applies $CUDA_VISIBLE_DEVICES to the GPUs. Pure.
# CUDA ignores entries that it does not understand, which leads to "no GPU" much later; here they are a DeviceError at
# once. An empty setting and -1 hide GPUs, as with CUDA.


def visible_gpus(gpus: Sequence[Device], environ: Mapping[str, str]) -> tuple[Device, ...]:
    """The GPUs that the setting names, by index in PCI order or by UUID (or its beginning), ascending by id. All of
    them if it is not set.

    Raises DeviceError for MIG slices, for unknown or repeated GPUs, and for indices whose meaning depends on CUDA's
    order by speed.
    """
    setting = environ.get(CUDA_DEVICES_VARIABLE)
    if setting is None or not gpus:
        return tuple(gpus)
    entries = _entries(setting)
    chosen = [_find(entry, gpus) for entry in entries]
    ids = [gpu.id for gpu in chosen]
    if len(set(ids)) < len(ids):
        raise DeviceError(f"{CUDA_DEVICES_VARIABLE}={setting} names a GPU twice", "name each once")
    if len(chosen) < len(gpus) and any(entry.isdigit() for entry in entries):
        _check_order(setting, gpus, environ)
    return tuple(sorted(chosen, key=lambda gpu: gpu.id))


def _entries(setting: str) -> list[str]:
    """The entries before the first -1, which hides itself and all that follow."""
    if not setting.strip():
        return []
    entries = [entry.strip() for entry in setting.split(",")]
    return entries[: entries.index("-1")] if "-1" in entries else entries


def _find(entry: str, gpus: Sequence[Device]) -> Device:
    if entry.startswith("MIG-"):
        raise DeviceError(
            f"{CUDA_DEVICES_VARIABLE} names the MIG slice {entry}, and slices cannot be handed out",
            "name whole GPUs, by index or UUID",
        )
    if entry.isascii() and entry.isdigit():
        matches = [gpu for gpu in gpus if str(gpu.id) == (entry.lstrip("0") or "0")]
    elif entry.startswith("GPU-"):
        matches = [gpu for gpu in gpus if gpu.uuid.startswith(entry)]
    else:
        matches = []
    if len(matches) == 1:
        return matches[0]
    fault = "is the beginning of several UUIDs" if matches else "is none of this machine's GPUs"
    known = ", ".join(f"{gpu.id} ({gpu.uuid})" for gpu in gpus)
    raise DeviceError(f"{entry!r} in {CUDA_DEVICES_VARIABLE} {fault}", f"there are: {known}")


def _check_order(setting: str, gpus: Sequence[Device], environ: Mapping[str, str]) -> None:
    """Raise DeviceError if the GPUs differ and no order is set: CUDA numbers them by speed then, so an index does not
    tell which GPU is meant."""
    unlike = len({gpu.name for gpu in gpus}) > 1
    if unlike and environ.get(CUDA_ORDER_VARIABLE) != "PCI_BUS_ID":
        raise DeviceError(
            f"{CUDA_DEVICES_VARIABLE}={setting} is ambiguous: the GPUs differ and CUDA orders them by speed",
            f"set {CUDA_ORDER_VARIABLE}=PCI_BUS_ID, or name them by UUID",
        )


# Which of a server's devices are not there any more: GPUs that the driver has lost, cores that are offline.

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
