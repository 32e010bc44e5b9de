"""Chooses the arguments of engines that the user did not give, so that they fit the machine. Each has its reason."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dynamo_local.core.shares import times_in_one
from dynamo_local.core.sizing.machine import GIB, MIB, Choice, Machine, Wanted, check_numbers, counted, integer, size
from dynamo_local.core.sizing.memory import (
    GPU_SHARE,
    Budget,
    TooLargeError,
    check_fits,
    check_length,
    cpu_budget,
    gpu_budget,
    shortest,
    utilization,
)
from dynamo_local.core.sizing.model_facts import ModelFacts, is_pooling

TENSOR_PARALLEL = "tensor-parallel-size"
KV_BYTES = "kv-cache-memory-bytes"
MAX_LEN = "max-model-len"
MAX_REQUESTS = "max-requests"
_SEQS = "max-num-seqs"
_UTILIZATION = "gpu-memory-utilization"

MEMORY_KEYS = (KV_BYTES, MAX_LEN, _UTILIZATION)
"""What keeps an engine within its part of a memory."""

_CPU_SEQS = 64
_CPU_SEQS_SCALING = 16
"""With a planner that acts, which goes by requests that wait and by KV usage: short requests saturate the cores long
before they fill the KV cache, so that nothing would ever be added at 64."""
_TOKENS_OF_A_REQUEST = 256
_USEFUL_KV = 4 * GIB
_LEAST_KV = GIB
_NO_KV = 16 * MIB
_INPUTS_IN_FLIGHT = 4096
_CPU_BLOCK = 32
_BROKEN_PREFIX_CACHE = ("granitemoehybrid",)
"""Model types whose first request vLLM 0.32 fails on a CPU with prefix caching (docs/guides/models.md)."""


@dataclass(frozen=True)
class EnginePlan:
    """What was chosen. `ranks`: devices of an engine. `slots`: CPU slots to make, None as the user says.

    `most_engines`: how many engines the memory has room for, where the planner may add some. `engine_bytes`: what each
    takes of the machine's memory at most, and `kv_bytes` what its KV cache does; None on GPUs, and where it is not
    known.
    """

    choices: tuple[Choice, ...]
    ranks: int
    slots: int | None
    most_engines: int
    engine_bytes: int | None = None
    kv_bytes: int | None = None


def plan_engines(facts: ModelFacts, machine: Machine, wanted: Wanted) -> EnginePlan:
    """Choose what was not given. Raises TooLargeError, with figures, if the model does not fit."""
    check_numbers(wanted.given)
    check_length(facts, wanted)
    dtype = _dtype(facts, machine, wanted)
    loaded = str(wanted.given.get("dtype") or (dtype.value if dtype else None) or facts.dtype)
    loaded = str(facts.dtype) if loaded == "auto" else loaded
    parallel = None
    if machine.on_gpu and ranks_given(wanted) == 1 and TENSOR_PARALLEL not in wanted.given and wanted.share == 1:
        parallel = choose_parallelism(facts, machine, wanted, loaded)
    ranks = int(parallel.value) if parallel else ranks_given(wanted)
    slots = choose_slots(machine, wanted, ranks)
    number = int(slots.value) if slots else machine.slots or machine.cores
    machine = replace(machine, slots=number)
    devices = machine.gpu_count if machine.on_gpu else number
    most = max(devices // ranks * times_in_one(wanted.share), wanted.engines)
    engine_bytes = kv_bytes = None
    if machine.on_gpu:
        choices = [parallel, *_on_gpu(facts, machine, wanted, ranks, loaded)]
    else:
        most = _most_engines(facts, machine, wanted, ranks, loaded, most)
        engines = most if wanted.scaling else wanted.engines
        found = list(_on_cpu(facts, machine, wanted, ranks, loaded, engines))
        kv = next((int(choice.value) for choice in found if choice.key == KV_BYTES), _given_kv(wanted))
        kv_bytes = None if kv is None else ranks * kv
        engine_bytes = _engine_bytes(facts, machine, wanted, ranks, loaded, kv_bytes)
        choices = [slots, *found]
    choices += [dtype, *_always(facts, machine, wanted), _frontend_choice(facts, wanted.given)]
    kept = tuple(choice for choice in choices if choice is not None and choice.key not in wanted.given)
    return EnginePlan(kept, ranks, None if slots is None else int(slots.value), most, engine_bytes, kv_bytes)


def _engine_bytes(
    facts: ModelFacts, machine: Machine, wanted: Wanted, ranks: int, dtype: str, kv_bytes: int | None
) -> int | None:
    """What an engine on CPUs takes of the memory: all its ranks, with weights, KV cache and the rest."""
    budget = cpu_budget(facts, machine, wanted, 1, ranks, dtype)
    return None if budget is None or kv_bytes is None else ranks * (budget.weights + budget.rest) + kv_bytes


def _dtype(facts: ModelFacts, machine: Machine, wanted: Wanted) -> Choice | None:
    if machine.on_gpu or "dtype" in wanted.given:
        return None
    if facts.dtype == "bfloat16":
        return Choice("dtype", "bfloat16", "as the model is stored", "all")
    if facts.dtype != "float32":
        return None
    if facts.weight_bytes is not None and facts.weight_bytes <= GIB:
        return Choice(
            "dtype", "float32", f"as the model is stored; its weights are only {size(facts.weight_bytes)}", "all"
        )
    return Choice("dtype", "bfloat16", "half the memory of the stored float32", "all")


def _most_engines(facts: ModelFacts, machine: Machine, wanted: Wanted, ranks: int, dtype: str, limit: int) -> int:
    """How many engines fit into the memory, up to `limit`. Raises TooLargeError if those asked for do not."""
    tokens = shortest(facts, wanted)
    asked = cpu_budget(facts, machine, wanted, wanted.engines, ranks, dtype)
    if asked is None:
        return wanted.engines
    engines = 1 if wanted.by_device else wanted.engines
    check_fits(asked, tokens, engines, "worker" if ranks == 1 else "rank", wanted)
    kv = max(asked.kv_of(tokens) or 0, _asked_kv(machine, wanted, asked) or 0)
    most = wanted.engines
    for number in range(wanted.engines + 1, limit + 1):
        budget = cpu_budget(facts, machine, wanted, number, ranks, dtype)
        if budget is None or budget.for_kv < kv:
            break
        most = number
    return most


def _given_kv(wanted: Wanted) -> int | None:
    given = integer(wanted.given.get(KV_BYTES))
    return wanted.kv_space if wanted.kv_space is not None else given


def _asked_kv(machine: Machine, wanted: Wanted, budget: Budget) -> int | None:
    """The KV cache that the user gives, in bytes or as the part of the memory that an engine may take."""
    kv, share = _given_kv(wanted), wanted.given.get(_UTILIZATION)
    if kv is not None or machine.memory is None or not isinstance(share, int | float):
        return kv
    return max(int(machine.memory * share) - budget.weights - budget.rest, 0)


def _on_cpu(
    facts: ModelFacts, machine: Machine, wanted: Wanted, ranks: int, dtype: str, engines: int
) -> Iterator[Choice]:
    budget = cpu_budget(facts, machine, wanted, engines, ranks, dtype)
    if facts.is_encoder:
        yield Choice(KV_BYTES, _NO_KV, "the model keeps no KV cache; vLLM wants a number")
        return
    if budget is None:
        if _given_kv(wanted) is None:
            yield Choice(KV_BYTES, _LEAST_KV, "the size of the model or of the memory is not known")
        return
    asked = _asked_kv(machine, wanted, budget)
    if asked is None:
        kv = _kv_bytes(facts, budget, wanted)
        yield Choice(KV_BYTES, kv, _kv_reason(budget, kv, None if wanted.by_device else engines))
    else:
        kv = asked
        _check_given_kv(budget, kv)
        if _given_kv(wanted) is None:
            yield Choice(KV_BYTES, kv, "by gpu-memory-utilization: of the whole memory, less weights and the rest")
    yield from _length(facts, wanted, budget, kv, f"{size(kv)} is for KV beside {size(budget.weights)} of weights")
    tokens = budget.tokens(kv)
    if tokens is not None:
        most = _CPU_SEQS_SCALING if wanted.scaling else _CPU_SEQS
        why = "the planner adds a worker when requests wait" if wanted.scaling else "more at once make each slower"
        seqs = max(1, min(most, tokens // _TOKENS_OF_A_REQUEST))
        yield Choice(_SEQS, seqs, f"requests at once; the KV cache holds {tokens} tokens, and {why}")


def _kv_bytes(facts: ModelFacts, budget: Budget, wanted: Wanted) -> int:
    """Room for one request of full length, or for several shorter ones; otherwise half of what is left."""
    length = integer(wanted.given.get(MAX_LEN)) or facts.max_position
    one = None if length is None else budget.kv_of(length)
    useful = _USEFUL_KV if one is None else max(_LEAST_KV, one, min(4 * one, _USEFUL_KV))
    least = budget.kv_of(shortest(facts, wanted)) or 0
    kv = min(useful, max(budget.for_kv // 2, min(budget.for_kv, _LEAST_KV), least))
    # In whole steps of 16 MiB, which people can read.
    return min(budget.for_kv, -(-kv // (16 * MIB)) * 16 * MIB)


def _kv_reason(budget: Budget, kv: int, engines: int | None) -> str:
    """`engines`: that divide the memory; None where each has its devices' part of it."""
    most = "all that fits" if kv >= budget.for_kv else f"up to {size(budget.for_kv)} would fit"
    if engines is None:
        return f"{most}: {budget.where}, {size(budget.total)} for each with {size(budget.weights)} of weights"
    return f"{most}: {budget.where}, for {counted(engines, 'worker')} with {size(budget.weights)} of weights each"


def _check_given_kv(budget: Budget, kv: int) -> None:
    if kv > budget.for_kv:
        raise TooLargeError(
            f"a KV cache of {size(kv)} does not fit beside {size(budget.weights)} of weights and "
            f"{size(budget.rest)} for the rest: {budget.where}, {size(max(budget.total, 0))} for each worker",
            "make it smaller (--kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE or --gpu-memory-utilization), or start "
            "fewer workers",
        )


def _length(facts: ModelFacts, wanted: Wanted, budget: Budget, kv: int, have: str) -> Iterator[Choice]:
    """The longest context, if its KV cache tells. Raises TooLargeError if the given one does not fit."""
    asked = integer(wanted.given.get(MAX_LEN))
    need = budget.kv_of(asked or facts.max_position or 0)
    if asked is not None and need is not None and need > kv:
        raise TooLargeError(
            f"max-model-len {asked} does not fit: its KV cache needs {size(need)}, and {have}",
            f"use at most --max-model-len {_rounded(budget.tokens(kv) or 0)}, or give more room to the KV cache",
        )
    if MAX_LEN in wanted.given or facts.max_position is None or need is None:
        return
    least = budget.kv_of(shortest(facts, wanted)) or 0
    if least > kv:
        raise TooLargeError(
            f"a KV cache of {size(kv)} is too small: {shortest(facts, wanted)} tokens need {size(least)}",
            "make it larger, or give a shorter context (--max-model-len)",
        )
    if need <= kv:
        reason = f"the longest of the model; its KV cache needs {size(need)}, and {have}"
        yield Choice(MAX_LEN, facts.max_position, reason, "all")
    else:
        reason = f"KV for one request of {facts.max_position} tokens needs {size(need)}, and {have}"
        yield Choice(MAX_LEN, _rounded(budget.tokens(kv) or 0), reason, "all")


def _rounded(tokens: int) -> int:
    step = 1024 if tokens >= 2048 else 128 if tokens >= 256 else 1
    return tokens // step * step


def _on_gpu(facts: ModelFacts, machine: Machine, wanted: Wanted, ranks: int, dtype: str) -> Iterator[Choice]:
    yield from _utilization(machine, wanted)
    budget = gpu_budget(facts, machine, wanted, ranks, dtype)
    if budget is None:
        return
    check_fits(budget, shortest(facts, wanted), 1, "engine", wanted)
    kv = _given_kv(wanted) if KV_BYTES in wanted.given else None
    kv = budget.for_kv if kv is None else kv
    if wanted.share < 1:
        _check_given_kv(budget, kv)
        # Without it vLLM measures how much is left, and takes for its own what others allocate on the GPU meanwhile.
        yield Choice(KV_BYTES, kv, f"what {size(budget.weights)} of weights and the rest leave of {budget.where}")
    have = f"{size(kv)} is left of {budget.where} beside {size(budget.weights)} of weights"
    yield from _length(facts, wanted, budget, kv, have)


def _utilization(machine: Machine, wanted: Wanted) -> Iterator[Choice]:
    """The part of a GPU's memory that an engine may take, where it is not vLLM's default."""
    given = wanted.given.get(_UTILIZATION)
    if wanted.share < 1 and isinstance(given, int | float) and given > wanted.share:
        raise TooLargeError(
            f"gpu-memory-utilization {given:g} is more than the share of a GPU that each worker gets, {wanted.share:g}",
            "leave it out, or give each worker a larger share (gpu)",
        )
    whole, part = utilization(machine), utilization(machine, wanted.share)
    least = min(machine.gpus, key=lambda gpu: gpu.free / gpu.memory, default=None)
    reasons = [f"{size(least.free)} of {size(least.memory)} is free on one of the GPUs"] if least is not None else []
    if whole == GPU_SHARE:
        reasons = []
    if wanted.share < 1:
        reasons.append(f"{wanted.share:g} of the {whole:.0%} of a GPU that engines may take")
    if reasons:
        yield Choice(_UTILIZATION, part, "; ".join(reasons))


def _always(facts: ModelFacts, machine: Machine, wanted: Wanted) -> Iterator[Choice]:
    why_not = why_no_transfer(facts, wanted.given, on_gpu=machine.on_gpu)
    if why_not is None:
        yield Choice("kv-transfer", True, "requests of a leaving worker move to another one with their KV cache")
    else:
        yield Choice("kv-transfer", False, why_not)
    if machine.on_gpu:
        return
    yield Choice("enforce-eager", True, "starts sooner: nothing is compiled")
    if why_not is None:
        yield Choice("block-size", _CPU_BLOCK, "caching and transfer go by whole blocks, and vLLM's 128 leave more out")
    if facts.model_type in _BROKEN_PREFIX_CACHE:
        reason = "vLLM fails requests to such models with it on a CPU"
        yield Choice("enable-prefix-caching", False, reason)


def _frontend_choice(facts: ModelFacts, given: Mapping[str, Any]) -> Choice | None:
    """The number of inputs in flight: clients of pooling models send many at once, and each takes one step."""
    if not is_pooling(facts, given):
        return None
    reason = "each input takes one step, and clients send up to 2048 in a request"
    return Choice(MAX_REQUESTS, _INPUTS_IN_FLIGHT, reason, "frontend")


# Whether workers can lend each other the KV cache of a model, by its kind (docs/guides/models.md).

_EXCLUSIVE = ("pipeline-parallel-size", "decode-context-parallel-size", "prefill-context-parallel-size")


def why_no_transfer(facts: ModelFacts, given: Mapping[str, Any], *, on_gpu: bool) -> str | None:
    """The reason why KV is not transferred; None if nothing is known against it. The engine decides in the end."""
    kinds = (
        (is_pooling(facts, given), "the model answers in one step, so requests never move"),
        (facts.has_recurrent_state, "the model has layers without a KV cache"),
        (facts.is_encoder_decoder, "the model has an encoder"),
        (facts.is_mla and not on_gpu, "not with latent attention on a CPU"),
        (_windowed(facts), "the model has layers with a sliding window"),
        (given.get("enable-prefix-caching") is False, "prefix caching is off"),
        (any(key in given for key in ("speculative-config", "spec-method", "spec-model")), "not with speculation"),
        (any((given.get(key) or 1) > 1 for key in _EXCLUSIVE), "only with tensor parallelism"),
    )
    return next((reason for holds, reason in kinds if holds), None)


def _windowed(facts: ModelFacts) -> bool:
    if facts.attention is None:
        return facts.sliding_window is not None
    return any(group.window is not None for group in facts.attention)


# How many devices an engine takes: tensor parallelism on GPUs, CPU slots elsewhere.

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
