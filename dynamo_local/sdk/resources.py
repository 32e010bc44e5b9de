"""Resources of each worker of a service: devices and cores."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dynamo_local.core.shares import LEAST_SHARE


@dataclass(frozen=True)
class DeviceUse:
    """Use of a worker's devices, by its configuration. `ranks`: number of devices that it computes on (None:
    `resources.gpu`). `virtual`: the worker computes nothing, so other servers may use the same devices."""

    ranks: int | None = None
    virtual: bool = False


_CPU = re.compile(r"(?P<cores>[0-9]+(?:\.[0-9]+)?)|(?P<milli>[0-9]+)m")
_GPU = re.compile(r"[0-9]+|[0-9]*\.[0-9]+")


@dataclass(frozen=True)
class Resources:
    """Resources of a worker. `gpu`: number of devices (GPUs, or CPU slots on a machine without GPUs), or the share of
    one, such as 0.5. `cpu`: number of cores, 0 if not given."""

    gpu: float = field(
        default=0,
        metadata={
            "help": "Number of devices of each worker: GPUs, or CPU slots on a machine without GPUs. Less than 1: the "
            "share that it has of one device, such as 0.5. "
            "By default as the service declares. A vLLM worker derives it from tensor-parallel-size and the like."
        },
    )
    cpu: float = field(
        default=0.0,
        metadata={
            "help": "Number of cores of each worker, such as 2, 0.5 or 500m. It is shown, and has no other effect."
        },
    )

    @classmethod
    def parse(cls, given: Mapping[str, Any] | Resources | None, default: Resources | None = None) -> Resources:
        """Read a mapping such as {"gpu": 1, "cpu": "500m"}; missing values come from `default`. Raises ValueError."""
        if isinstance(given, Resources):
            given = {"gpu": given.gpu, "cpu": given.cpu}
        base = default or cls()
        if given is None:
            return base
        if not isinstance(given, Mapping):
            raise ValueError(f"resources must be a mapping with gpu and cpu, not {given!r}")
        for name in given:
            if name not in ("gpu", "cpu"):
                raise ValueError(f"resources has no {name!r}; allowed are gpu, cpu")
        return cls(
            gpu=_gpu(given["gpu"]) if "gpu" in given else base.gpu,
            cpu=_cpu(given["cpu"]) if "cpu" in given else base.cpu,
        )


def _gpu(value: object) -> float:
    """A whole number as an int, a share as a float."""
    number = float(value) if isinstance(value, str) and _GPU.fullmatch(value) else value
    if isinstance(number, int | float) and not isinstance(number, bool) and 0 <= number < float("inf"):
        if number == int(number):
            return int(number)
        if LEAST_SHARE <= number < 1:
            return number
    raise ValueError(
        f"resources.gpu must be a whole number of devices, or a share of one such as 0.5, of at least {LEAST_SHARE}, "
        f"not {value!r}"
    )


def _cpu(value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf"):
        return float(value)
    match = _CPU.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"resources.cpu must be a number of cores such as 2, 0.5 or '500m', not {value!r}")
    return float(match["cores"]) if match["cores"] else int(match["milli"]) / 1000
