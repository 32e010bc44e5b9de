"""Applies $CUDA_VISIBLE_DEVICES to the GPUs. Pure.

CUDA ignores entries that it does not understand, which leads to "no GPU" much later; here they are a DeviceError at
once. An empty setting and -1 hide GPUs, as with CUDA.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dynamo_local.core.errors import DeviceError
from state.devices.allocation import CUDA_DEVICES_VARIABLE, CUDA_ORDER_VARIABLE, Device


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
