"""Devices, their allocation to processes, and the environment that tells a process of its own. Pure.

A device is a GPU or, where none is used, a CPU slot (a set of cores). At most one process of a server holds a device
whole; or several hold shares of it, which add up to at most 1. GPUs, and slots that have cores of their own, also have
at most one holder on the machine (`state.devices.holding`). Slots whose number was chosen by the user may share
cores, and are not held on the machine.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

import msgspec

from dynamo_local.core.errors import DeviceError
from dynamo_local.core.shares import held, placed, summed

DeviceKind = Literal["gpu", "cpu-slot"]

CPU_CORES_VARIABLE = "DYN_CPU_CORES"
"""Set by the server in a worker on CPU slots: cores of its slots, comma-separated for each slot, the slots separated by
"|". The engine binds the threads of each rank to the cores of one slot."""
OMP_THREADS_VARIABLE = "OMP_NUM_THREADS"
"""Number of OpenMP threads of each rank of an engine. By default the number of cores of its CPU slot."""
DEVICES_VARIABLE = "DYN_DEVICES"
"""Set by the server in each worker: names on the machine of the worker's devices, comma-separated."""
SHARE_VARIABLE = "DYN_DEVICE_SHARE"
"""Set by the server in a worker that has a share of a device: that share, such as 0.5. Other workers may be on the same
device."""

CUDA_DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
"""GPUs that the server may use, by index or UUID, comma-separated. By default all GPUs."""
CUDA_ORDER_VARIABLE = "CUDA_DEVICE_ORDER"
"""Order of the indices in CUDA_VISIBLE_DEVICES. Must be PCI_BUS_ID if the GPUs differ and are given by index."""


class Device(msgspec.Struct, frozen=True):
    """A device. A GPU's id is its index in PCI order; a CPU slot has `cores`, a GPU has a `uuid`."""

    id: int
    kind: DeviceKind
    name: str
    cores: tuple[int, ...] = ()
    uuid: str = ""


class Inventory(msgspec.Struct, frozen=True):
    """The devices that may be handed out: all of one kind, ids distinct and ascending, not necessarily
    0..n-1. `exclusive`: each has one holder on the machine. `gone`: those that are not there any more, each with the
    reason: they are not handed out."""

    kind: DeviceKind
    devices: tuple[Device, ...]
    exclusive: bool = True
    gone: Mapping[int, str] = {}

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
        """Ids that are not taken, ascending, without those that are gone."""
        return tuple(device_id for device_id in self.ids if device_id not in taken and device_id not in self.gone)

    def lacking(self, gone: Mapping[int, str]) -> Inventory:
        """The inventory of which these devices are gone, each with the reason."""
        return msgspec.structs.replace(self, gone=gone)

    def machine_names(self, ids: Iterable[int]) -> tuple[str, ...]:
        """Names of the devices that are the same for all servers of the machine: a GPU's UUID, each core of a slot.
        None if the devices are not exclusive."""
        if not self.exclusive:
            return ()
        return tuple(name for device_id in ids for name in _machine_names(self.device(device_id)))


_NOBODY: Mapping[int, str] = MappingProxyType({})


def noun(kind: DeviceKind, count: int) -> str:
    """The noun for that many devices of the kind, for messages."""
    singular = "GPU" if kind == "gpu" else "CPU slot"
    return singular if count == 1 else f"{singular}s"


def allocate(
    inventory: Inventory,
    taken: Mapping[int, float],
    count: int,
    needed_by: str = "the service",
    elsewhere: Mapping[int, str] = _NOBODY,
    share: float = 1.0,
) -> tuple[int, ...]:
    """Choose the `count` lowest ids of devices of which nothing is taken. With a `share` below 1: the one device with
    the least room that is still enough, so that others stay free for workers that need whole ones.

    `taken`: how much of each device is taken, by id. Devices that others hold `elsewhere` (holders by id) are left out.
    Raises DeviceError when too few are free: devices are never over-subscribed.
    """
    if count < 0:
        raise DeviceError(f"{needed_by} asks for {count} devices", "ask for 0 or more")
    left = {device_id: 1 - taken.get(device_id, 0.0) for device_id in inventory.free(elsewhere)}
    found = placed(left, [held(count, share)])
    if found is None:
        raise shortage(inventory, taken, count, needed_by, elsewhere, share)
    return found[0]


def shortage(
    inventory: Inventory,
    taken: Mapping[int, float],
    count: int,
    needed_by: str,
    elsewhere: Mapping[int, str] = _NOBODY,
    share: float = 1.0,
) -> DeviceError:
    """The error that says why `allocate` finds too little."""
    if share < 1:
        total = len(inventory.devices)
        available = (
            f"no {noun(inventory.kind, 1)} of {total} has as much room" if total else _availability(inventory, ())
        )
        needed, others = f"{share:g} of a device", elsewhere
    else:
        available = _availability(inventory, inventory.free({*taken, *elsewhere}))
        needed = f"{count} device" if count == 1 else f"{count} devices"
        others = {device_id: who for device_id, who in elsewhere.items() if device_id not in taken}
    cause = f"{needed_by} needs {needed}, {available}{held_by(inventory.kind, others)}{_gone(inventory)}"
    return DeviceError(cause, _remedy(inventory, count, bool(others)))


def held_by(kind: DeviceKind, holders: Mapping[int, str]) -> str:
    """Text to append to a message: which devices others hold, and who they are. Empty if nobody holds one."""
    return "".join(f"; {line}" for line in holder_lines(kind, holders))


def gone_line(kind: DeviceKind, device_id: int, why: str) -> str:
    """Says that a device is not there any more."""
    return f"{noun(kind, 1)} {device_id} is gone ({why})"


def holder_lines(kind: DeviceKind, holders: Mapping[int, str]) -> list[str]:
    """A line for each device that others hold, with its holder."""
    return [f"{noun(kind, 1)} {device_id} is held by {who}" for device_id, who in sorted(holders.items())]


def environment_for(inventory: Inventory, ids: Iterable[int]) -> dict[str, str]:
    """The environment of a process that holds exactly these devices. All other GPUs are hidden from it.

    GPUs are named by index in PCI order. CUDA's own default order is by speed, hence CUDA_DEVICE_ORDER.
    """
    devices = [inventory.device(device_id) for device_id in ids]
    if inventory.kind == "gpu" and devices:
        visible = ",".join(str(device.id) for device in devices)
        return {CUDA_DEVICES_VARIABLE: visible, CUDA_ORDER_VARIABLE: "PCI_BUS_ID"}
    settings = {CUDA_DEVICES_VARIABLE: ""}
    if devices:
        settings[CPU_CORES_VARIABLE] = "|".join(",".join(map(str, device.cores)) for device in devices)
    return settings


def cores_of_slots(setting: str) -> tuple[tuple[int, ...], ...]:
    """Parse the value of $DYN_CPU_CORES: the cores of each slot."""
    return tuple(tuple(map(int, slot.split(","))) for slot in setting.split("|"))


def threads_for(inventory: Inventory, ids: Iterable[int], share: float = 1.0) -> dict[str, str]:
    """The default environment of such a process, which its own settings override: one OpenMP thread for each core of a
    slot, or for its share of these cores.

    It must be set when the process starts: OpenMP reads it when it is loaded, and a preloaded library loads it before
    any code of the process runs. More threads than cores would spin while they wait for each other, which makes
    everything many times slower.
    """
    cores = [len(inventory.device(device_id).cores) for device_id in ids]
    if not cores or inventory.kind == "gpu":
        return {}
    return {OMP_THREADS_VARIABLE: str(max(1, int(summed([min(cores) * share]))))}


def cpu_slots(cores: Sequence[int], count: int, *, exclusive: bool = False) -> Inventory:
    """Divide the cores into `count` CPU slots. Fewer slots than cores get contiguous runs whose lengths differ by at
    most one. More slots share cores: slot i gets core i modulo their number. Raises DeviceError."""
    ordered = sorted(set(cores))
    if count < 1 or not ordered:
        raise DeviceError(f"cannot make {count} CPU slots of {len(ordered)} cores", "ask for 1 slot or more")
    return Inventory("cpu-slot", tuple(_slot(index, ordered, count) for index in range(count)), exclusive)


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


def _gone(inventory: Inventory) -> str:
    return "".join(f"; {gone_line(inventory.kind, number, why)}" for number, why in sorted(inventory.gone.items()))


def gone_remedy(kind: DeviceKind) -> str:
    """What to do about a device that is not there any more."""
    if kind == "cpu-slot":
        return "bring its cores online again"
    return "see what nvidia-smi and the kernel's log say of it; it is used again once it answers"


def _remedy(inventory: Inventory, count: int, held_elsewhere: bool) -> str:
    if inventory.gone:
        return gone_remedy(inventory.kind)
    fewer = "ask for fewer workers or devices a worker"
    if held_elsewhere:
        virtual = f"give this server CPU slots that may share cores (--cpu-slots {max(count, len(inventory.devices))})"
        return f"end that, or {virtual if inventory.kind == 'cpu-slot' else fewer}"
    if inventory.kind == "cpu-slot":
        return f"{fewer}, or more CPU slots, which may share cores (--cpu-slots)"
    if count <= len(inventory.devices):
        return f"{fewer}, or stop what holds the others"
    return f"{fewer}, or make more GPUs visible in {CUDA_DEVICES_VARIABLE}"


def _machine_names(device: Device) -> tuple[str, ...]:
    return (device.uuid,) if device.kind == "gpu" else tuple(f"core-{core}" for core in device.cores)


def _listing(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"
