"""What an engine needs of a memory, and what is left for its KV cache.

Allowances are for what is neither weights nor KV, and are meant to be rather too large.
"""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_local.core.errors import UsageError
from dynamo_local.core.shares import summed
from dynamo_local.core.sizing.machine import GIB, MIB, Machine, Wanted, counted, integer, size
from dynamo_local.core.sizing.model_facts import DTYPE_BYTES, ModelFacts

SERVER_BYTES = 1536 * MIB
"""Frontend, fork server and the other services of a server on the CPU's memory."""
ENGINE_BYTES = 768 * MIB
"""An engine on a CPU beside weights and KV: its processes, and what a step computes with."""
GPU_ENGINE_BYTES = 2 * GIB
"""An engine on a GPU beside weights and KV: CUDA's context, graphs, and what a step computes with."""
SPARE = 0.05
"""Part of the free memory that stays free."""

BLOCK = 128
"""Largest block, in tokens, that vLLM takes by default; caches are whole blocks, and one block is kept back."""
SHORTEST = 512
"""Context in tokens with which a model is of some use."""


class TooLargeError(UsageError):
    """The model does not fit the memory, or not so often, or its context is shorter than the one asked for."""


@dataclass(frozen=True)
class Budget:
    """Memory of one rank of an engine: a GPU's, or its part of the machine's.

    `total` is for weights, KV and the rest; `weights` and `rest` are what the first and the last need.
    """

    total: int
    weights: int
    rest: int
    token: int | None
    """KV cache of one token; None where the model's configuration does not tell."""
    where: str

    @property
    def for_kv(self) -> int:
        return self.total - self.weights - self.rest

    def tokens(self, kv: int) -> int | None:
        """The longest context whose KV cache fits into `kv` bytes."""
        return None if self.token is None else max(kv // self.token - 2 * BLOCK, 0)

    def kv_of(self, tokens: int) -> int | None:
        """KV cache for a context of so many tokens, with the blocks beside it."""
        return None if self.token is None else (tokens + 2 * BLOCK) * self.token


def loaded_bytes(facts: ModelFacts, dtype: str | None) -> int | None:
    """Size of the weights in memory, which differs from that on disk where they are loaded in another data type."""
    if facts.weight_bytes is None:
        return None
    stored = DTYPE_BYTES.get(facts.weight_dtype or "")
    wanted = DTYPE_BYTES.get(dtype or "")
    if facts.quantization is not None or stored is None or wanted is None:
        return facts.weight_bytes
    return facts.weight_bytes * wanted // stored


def cpu_budget(
    facts: ModelFacts, machine: Machine, wanted: Wanted, engines: int, ranks: int, dtype: str | None
) -> Budget | None:
    """The budget of one rank where so many engines divide the machine's memory, or where each device has its part of it
    (`wanted.by_device`); None where sizes are unknown."""
    weights = loaded_bytes(facts, dtype)
    if machine.free is None or weights is None:
        return None
    usable = int(machine.free * (1 - SPARE)) - SERVER_BYTES
    if wanted.by_device:
        slots = machine.slots or machine.cores
        total = int(usable * wanted.share / slots)
        where = f"{size(machine.free)} of memory was free at the server's start, for {counted(slots, 'CPU slot')}"
        if wanted.share < 1:
            where = f"{where}, of which each worker gets {wanted.share:g} of one"
    else:
        total = usable // (engines * ranks)
        where = f"{size(machine.free)} of memory is free"
    return Budget(total, -(-weights // ranks), ENGINE_BYTES, _token(facts, ranks, dtype), where)


def gpu_budget(facts: ModelFacts, machine: Machine, wanted: Wanted, ranks: int, dtype: str | None) -> Budget | None:
    """The budget on the GPU with the least memory, or of a share of it; None where sizes are unknown."""
    weights = loaded_bytes(facts, dtype)
    if not machine.gpus or weights is None:
        return None
    least = min(machine.gpus, key=lambda gpu: gpu.memory)
    part = wanted.given.get("gpu-memory-utilization", utilization(machine, wanted.share))
    where = f"{part:.0%} of a GPU with {size(least.memory)}"
    if wanted.share < 1:
        where = f"{where}, for {wanted.share:g} of it"
    token = _token(facts, ranks, dtype)
    return Budget(int(least.memory * part), -(-weights // ranks), GPU_ENGINE_BYTES, token, where)


GPU_SHARE = 0.92
"""vLLM's default of gpu-memory-utilization."""


def utilization(machine: Machine, share: float = 1.0) -> float:
    """The part of a GPU's memory that an engine may take: vLLM's default, or what is free if that is less; or a share
    of that, rounded down to thousandths."""
    free = min((gpu.free / gpu.memory for gpu in machine.gpus), default=1.0)
    whole = max(min(GPU_SHARE, int(free * 100 - 1) / 100), 0.0)
    return whole if share == 1 else int(summed([whole * share * 1000])) / 1000


def _token(facts: ModelFacts, ranks: int, dtype: str | None) -> int | None:
    whole = facts.kv_bytes_per_token(DTYPE_BYTES.get(dtype or "", 2))
    if whole is None:
        return None
    # Ranks share the heads of keys and values, and have copies where there are more ranks than heads.
    shares = 1 if facts.is_mla else min(ranks, facts.kv_heads or 1)
    return -(-whole // shares)


def shortest(facts: ModelFacts, wanted: Wanted) -> int:
    """The shortest context that is worth serving, or the one that is asked for."""
    asked = integer(wanted.given.get("max-model-len"))
    return asked or min(SHORTEST, facts.max_position or SHORTEST)


def check_length(facts: ModelFacts, wanted: Wanted) -> None:
    """Raise TooLargeError for a context that vLLM refuses since the model's positions end before."""
    asked = integer(wanted.given.get("max-model-len"))
    longest = facts.longest_given
    # Overrides may change how many positions there are.
    if asked is None or longest is None or asked <= longest or wanted.any_length or wanted.given.get("hf-overrides"):
        return
    raise TooLargeError(
        f"max-model-len {asked} is more than the model has: its context ends at {longest} tokens",
        f"use at most --max-model-len {longest}; --hf-overrides changes the RoPE scaling of models that allow it",
    )


def check_fits(budget: Budget, tokens: int, engines: int, engine: str, wanted: Wanted) -> None:
    """Raise TooLargeError, with figures, if an engine does not get by with its budget."""
    kv = budget.kv_of(tokens) or 0
    need = budget.weights + budget.rest + kv
    if need <= budget.total:
        return
    parts = f"{size(budget.weights)} of weights, {size(kv)} of KV cache for {tokens} tokens, {size(budget.rest)} beside"
    have = f"{budget.where}, {size(max(budget.total, 0))} for each {engine}"
    times = f"{counted(engines, 'worker')} with " if engines > 1 else ""
    more = "give each worker a larger part of a device, " if wanted.share < 1 else ""
    fewer = "start fewer workers, " if engines > 1 else more
    raise TooLargeError(
        f"the model does not fit: {times}{parts} need {size(need)} {'each' if engines > 1 else 'in all'}, and {have}",
        f"{fewer}serve a smaller or a quantized model, or a shorter context (--max-model-len)",
    )


# Shared memory that engines need. Pure.

ENGINE_SHARED_BYTES = 240 * 1024 * 1024
"""Room in /dev/shm without which vLLM does not start an engine on a CPU, or one with several ranks: that of its largest
message queue, 10 chunks of 24 MiB. Its queues fill little of it, so engines can have the same room."""
