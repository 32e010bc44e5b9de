"""The machine that engines run on, and what the user has asked for. Sizes are bytes; None is unknown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from dynamo_local.core.errors import UsageError

GIB = 2**30
MIB = 2**20


@dataclass(frozen=True)
class Gpu:
    """Memory of one GPU."""

    memory: int
    free: int


@dataclass(frozen=True)
class Machine:
    """Devices and memory that a server may use.

    `slots`: CPU slots among which `cores` are divided, None if the number may be chosen. `memory` and `free` are those
    of the machine or, where that is less, of the control group. `gpus` is empty where engines run on CPUs. Where
    endpoints come and go, all is as it was before the first of their workers.
    """

    cores: int
    slots: int | None = None
    memory: int | None = None
    free: int | None = None
    gpus: tuple[Gpu, ...] = ()
    gpu_count: int = 0
    """Number of GPUs; more than `gpus` has where their memory is unknown."""

    @property
    def on_gpu(self) -> bool:
        return self.gpu_count > 0


@dataclass(frozen=True)
class Wanted:
    """What the user has asked for. `given`: engine arguments, by key, which are never changed.

    `workers` decode, or do both; `prefill_workers` is 0 in a graph without such. `scaling`: the planner may add
    workers.
    `share`: below 1, the part of one device that each engine gets. `by_device`: an engine's memory goes by its devices
    alone, so that it does not depend on which others there are; False: the engines that are wanted divide the memory.
    `kv_space`: KV cache of an engine on a CPU by $VLLM_CPU_KVCACHE_SPACE. `any_length`: vLLM is to take a context
    longer than the model's, by $VLLM_ALLOW_LONG_MAX_MODEL_LEN. `endpoint_slots`: CPU slots to make for endpoints, which
    are served beside.
    """

    workers: int = 1
    prefill_workers: int = 0
    scaling: bool = False
    given: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    share: float = 1.0
    by_device: bool = False
    kv_space: int | None = None
    any_length: bool = False
    endpoint_slots: int = 0

    @property
    def engines(self) -> int:
        """Number of engines at the start, each with a copy of the model."""
        return self.workers + self.prefill_workers


Readers = Literal["engines", "frontend", "all"]
"""Which services an argument is for: those with an engine, the frontend, or both."""


@dataclass(frozen=True)
class Choice:
    """A setting that was chosen, with its reason. `value` None: nothing was chosen. `services`: those of a graph that
    get it; empty if it concerns no configuration, or no graph yet."""

    key: str
    value: Any
    reason: str
    readers: Readers = "engines"
    services: tuple[str, ...] = ()


def size(count: float) -> str:
    """Bytes for people: "4.4 GiB", "12 MiB"."""
    return f"{count / GIB:.1f} GiB" if count >= GIB / 10 else f"{count / MIB:.0f} MiB"


def counted(number: int, noun: str) -> str:
    """A number with its noun: "1 worker", "2 workers"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def integer(value: Any) -> int | None:
    """A number of tokens or bytes as vLLM's arguments spell it: 4096, "4k" (4000), "4K" (4096), "1.5m". None for
    anything else, "auto" and -1 included."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int):
        return value if value >= 0 else None
    if not isinstance(value, str) or not value:
        return None
    factor = _SUFFIXES.get(value[-1], 1)
    number = value[:-1] if value[-1] in _SUFFIXES else value
    try:
        return round(float(number) * factor) if float(number) >= 0 else None
    except (ValueError, OverflowError):
        return None


def check_numbers(given: Mapping[str, Any]) -> None:
    """Raise UsageError for an argument that should be a number of tokens or bytes, as vLLM spells them, and is none."""
    for key in _NUMBERS:
        value = given.get(key)
        if value in (None, "auto", -1, "-1") or integer(value) is not None:
            continue
        raise UsageError(f"{key}: {value!r} is not a number", "write 4096, 4k (4000) or 4K (4096)")


_NUMBERS = ("max-model-len", "max-num-batched-tokens", "kv-cache-memory-bytes")
_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
