"""Chooses how many devices an engine takes: tensor parallelism on GPUs, CPU slots elsewhere."""

from __future__ import annotations

import math

from dynamo_local.core.shares import times_in_one
from dynamo_local.core.sizing.machine import Choice, Machine, Wanted, counted, size
from dynamo_local.core.sizing.memory import check_fits, gpu_budget, shortest
from dynamo_local.core.sizing.model_facts import ModelFacts

TENSOR_PARALLEL = "tensor-parallel-size"
_SIZES = (TENSOR_PARALLEL, "pipeline-parallel-size", "prefill-context-parallel-size", "data-parallel-size")
_LEAST_SLOTS = 4
"""CPU slots of a server with endpoints, so that some can be created while it runs."""

_SLOTS_OF_A_CORE = 4
"""The most CPU slots that share a core unless the user asks for more: there each worker is as slow as it sounds."""

_USUAL_CONTEXT = 8192
"""Context in tokens for which a GPU more is taken if one fewer has no room for it."""


def ranks_given(wanted: Wanted) -> int:
    """Devices of an engine by the arguments that the user gave."""
    return math.prod(wanted.given.get(key) or 1 for key in _SIZES)


def parallel_sizes(facts: ModelFacts, most: int) -> list[int]:
    """The numbers of GPUs, up to `most`, among which the heads of the model can be divided; ascending."""
    return [number for number in range(1, most + 1) if _divides(facts, number)]


def _divides(facts: ModelFacts, number: int) -> bool:
    if facts.heads is not None and facts.heads % number:
        return False
    if facts.kv_heads is None or facts.is_mla:
        return True
    return facts.kv_heads % number == 0 or number % facts.kv_heads == 0


def choose_parallelism(facts: ModelFacts, machine: Machine, wanted: Wanted, dtype: str | None) -> Choice:
    """The smallest number of GPUs that has room for the model. Raises TooLargeError with figures if none has."""
    engines = max(wanted.engines, 1)
    sizes = parallel_sizes(facts, machine.gpu_count // engines) or [1]
    budgets = {number: gpu_budget(facts, machine, wanted, number, dtype) for number in sizes}
    least = shortest(facts, wanted)
    usual = max(least, min(_USUAL_CONTEXT, facts.max_position or _USUAL_CONTEXT))
    for tokens in (usual, least):
        for number, budget in budgets.items():
            if budget is None:
                return Choice(TENSOR_PARALLEL, 1, "how much memory the model or the GPUs have is not known")
            if (budget.kv_of(tokens) or 0) <= budget.for_kv:
                reason = f"{size(budget.weights)} of weights and the KV cache of {tokens} tokens fit in {budget.where}"
                if number > 1:
                    reason = f"{reason}, and not on fewer; {facts.heads or 'the'} heads are divided by {number}"
                return Choice(TENSOR_PARALLEL, number, reason)
    last = budgets[sizes[-1]]
    if last is not None:
        # Always raises: no size had room.
        check_fits(last, least, 1, f"of {counted(sizes[-1], 'GPU')}", wanted)
    return Choice(TENSOR_PARALLEL, sizes[-1], "the largest that divides the heads of the model")


def choose_slots(machine: Machine, wanted: Wanted, ranks: int) -> Choice | None:
    """How many CPU slots the cores are divided into; None where the user has said so, or on GPUs."""
    if machine.on_gpu or machine.slots is not None:
        return None
    needed = wanted.engines * ranks if wanted.share == 1 else -(-wanted.engines // times_in_one(wanted.share))
    slots = min(machine.cores, max(2 * needed, 4) if wanted.scaling else 2 * needed)
    if needed > slots:
        # Refused by whoever hands out devices, with the names of their holders.
        return None
    slots = max(slots, min(needed + wanted.endpoint_slots, _SLOTS_OF_A_CORE * machine.cores))
    rest = slots - needed
    spare = f"{rest} for more workers and the server's other processes" if rest else "none for other processes alone"
    if wanted.endpoint_slots:
        spare = f"{rest} for endpoints"
    return Choice("cpu-slots", slots, f"{_each(slots, machine.cores)}: {needed} for the workers, {spare}")


def slots_for_endpoints(least: int, most: int, cores: int) -> Choice:
    """How many CPU slots a server has for its endpoints. `least`, `most`: slots of the least and the most workers of
    all of them. One more is for the next revision of an endpoint; more slots than cores share cores, up to four each.
    The slots may be too few: whoever looks after endpoints refuses them then, or has them wait."""
    slots = max(min(least + 1, _SLOTS_OF_A_CORE * cores), min(most + 1, cores), _LEAST_SLOTS)
    rest = max(slots - least, 0)
    reason = f"{_each(slots, cores)}: {least} for the workers at the start, {rest} for updates and more workers"
    return Choice("cpu-slots", slots, reason)


def _each(slots: int, cores: int) -> str:
    if slots > cores:
        return f"which share {counted(cores, 'core')}"
    return f"{counted(cores // slots, 'core')} each, of {cores}"
