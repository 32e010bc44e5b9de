"""What a device is, who gets which, and what a process must be told about its own. Pure.

A device is a GPU or, where none is used, a CPU slot (a set of cores). A device is held by at most one
process.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from dynamo_local.core.errors import DeviceError

DeviceKind = Literal["gpu", "cpu-slot"]

CPU_CORES_VARIABLE = "DYN_CPU_CORES"
OMP_THREADS_VARIABLE = "OMP_NUM_THREADS"
"""Comma-separated cores of a process on CPU slots. An engine binds its threads to them."""

CUDA_DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
CUDA_ORDER_VARIABLE = "CUDA_DEVICE_ORDER"


@dataclass(frozen=True)
class Device:
    """One device. A GPU's id is its index in PCI order; a CPU slot has `cores`, a GPU has a `uuid`."""

    id: int
    kind: DeviceKind
    name: str
    cores: tuple[int, ...] = ()
    uuid: str = ""


@dataclass(frozen=True)
class Inventory:
    """The devices that may be handed out: all of one kind, ids distinct and ascending, not necessarily
    0..n-1."""

    kind: DeviceKind
    devices: tuple[Device, ...]

    def __post_init__(self) -> None:
        ids = self.ids
        if list(ids) != sorted(set(ids)):
            raise DeviceError(f"device ids {list(ids)} are not distinct and ascending")
        if any(device.kind != self.kind for device in self.devices):
            raise DeviceError(f"an inventory of kind {self.kind} holds a device of another kind")

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(device.id for device in self.devices)

    def device(self, device_id: int) -> Device:
        """The device of that id, or DeviceError."""
        for device in self.devices:
            if device.id == device_id:
                return device
        raise DeviceError(f"there is no {noun(self.kind, 1)} {device_id}", f"ids are {_listing(self.ids)}")

    def free(self, taken: Collection[int]) -> tuple[int, ...]:
        """Ids that nobody holds, ascending."""
        return tuple(device_id for device_id in self.ids if device_id not in taken)


def noun(kind: DeviceKind, count: int) -> str:
    """What to call that many devices of the kind in a message."""
    singular = "GPU" if kind == "gpu" else "CPU slot"
    return singular if count == 1 else f"{singular}s"


def allocate(
    inventory: Inventory, taken: Collection[int], count: int, needed_by: str = "the service"
) -> tuple[int, ...]:
    """The `count` lowest ids that are not taken. Raises DeviceError when fewer are free: never
    over-subscribes."""
    if count < 0:
        raise DeviceError(f"{needed_by} asks for {count} devices", "ask for 0 or more")
    free = inventory.free(taken)
    if count > len(free):
        needed = f"{count} device" if count == 1 else f"{count} devices"
        available = _availability(inventory, free)
        raise DeviceError(f"{needed_by} needs {needed}, {available}", _remedy(inventory, count))
    return free[:count]


def environment_for(inventory: Inventory, ids: Iterable[int]) -> dict[str, str]:
    """Settings for a process that holds exactly these devices. A GPU it does not hold is hidden from it.

    GPUs are named by index in PCI order. CUDA's own default order is by speed, hence CUDA_DEVICE_ORDER.
    """
    devices = [inventory.device(device_id) for device_id in ids]
    if inventory.kind == "gpu" and devices:
        visible = ",".join(str(device.id) for device in devices)
        return {CUDA_DEVICES_VARIABLE: visible, CUDA_ORDER_VARIABLE: "PCI_BUS_ID"}
    settings = {CUDA_DEVICES_VARIABLE: ""}
    if devices:
        # Slots share a core when there are more slots than cores.
        cores = sorted({core for device in devices for core in device.cores})
        settings[CPU_CORES_VARIABLE] = ",".join(map(str, cores))
    return settings


def threads_for(inventory: Inventory, ids: Iterable[int]) -> dict[str, str]:
    """What such a process is to find unless its own settings say otherwise: as many OpenMP threads as cores.

    From its first moment: OpenMP reads it when it is loaded, which a preloaded library does before any code of the
    process runs. More threads than cores wait for each other by spinning, and everything becomes many times slower.
    """
    cores = {core for device_id in ids for core in inventory.device(device_id).cores}
    return {OMP_THREADS_VARIABLE: str(len(cores))} if cores and inventory.kind != "gpu" else {}


def cpu_slots(cores: Sequence[int], count: int) -> Inventory:
    """`count` CPU slots over the cores: fewer slots than cores get contiguous runs whose lengths differ by at
    most one, more slots share cores (slot i gets core i modulo their number)."""
    ordered = sorted(set(cores))
    if count < 1 or not ordered:
        raise DeviceError(f"cannot make {count} CPU slots of {len(ordered)} cores", "ask for 1 slot or more")
    return Inventory("cpu-slot", tuple(_slot(index, ordered, count) for index in range(count)))


def _slot(index: int, cores: Sequence[int], count: int) -> Device:
    if count >= len(cores):
        mine = [cores[index % len(cores)]]
    else:
        mine = list(cores[index * len(cores) // count : (index + 1) * len(cores) // count])
    label = "core" if len(mine) == 1 else "cores"
    return Device(index, "cpu-slot", f"CPU {label} {_listing(mine)}", cores=tuple(mine))


def _availability(inventory: Inventory, free: Sequence[int]) -> str:
    total = len(inventory.devices)
    if total == 0:
        return f"there is no {noun(inventory.kind, 1)}"
    verb = "is" if len(free) == 1 else "are"
    return f"{len(free)} of {total} {noun(inventory.kind, total)} {verb} free"


def _remedy(inventory: Inventory, count: int) -> str:
    fewer = "ask for fewer workers or devices a worker"
    if inventory.kind == "cpu-slot":
        return f"{fewer}, or set more CPU slots with DYN_CPU_SLOTS (more than cores are allowed)"
    if count <= len(inventory.devices):
        return f"{fewer}, or stop what holds the others"
    return f"{fewer}, or make more GPUs visible in {CUDA_DEVICES_VARIABLE}"


def _listing(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"
