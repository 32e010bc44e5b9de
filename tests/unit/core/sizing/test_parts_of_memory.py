"""Whatever endpoints run together, their engines' memory adds up to at most the machine's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.sizing.choosing import KV_BYTES, MAX_LEN, plan_engines
from dynamo_local.core.sizing.machine import GIB, MIB, Gpu, Machine, Wanted
from dynamo_local.core.sizing.memory import ENGINE_BYTES, GPU_ENGINE_BYTES, SERVER_BYTES, TooLargeError
from dynamo_local.core.sizing.model_facts import ModelFacts
from tests.unit.core.sizing.test_choosing import LLAMA_70B, QWEN3_SMALL, gpus, models, reason, values

UTILIZATION = "gpu-memory-utilization"
SHARES = st.sampled_from([1.0, 0.7, 2 / 3, 0.5, 1 / 3, 0.25, 0.1])


def by_device(share: float = 1.0, **given: object) -> Wanted:
    return Wanted(share=share, by_device=True, given={key.replace("_", "-"): value for key, value in given.items()})


@given(
    st.lists(st.tuples(models(), SHARES), min_size=1, max_size=6),
    st.integers(1, 16),
    st.integers(2 * GIB, 256 * GIB),
)
def test_engines_of_any_mix_take_no_more_than_the_memory(
    mix: list[tuple[ModelFacts, float]], slots: int, free: int
) -> None:
    machine = Machine(16, slots, free, free)
    taken, used = 0, 0.0
    for facts, share in mix:
        if used + share > slots:
            break
        try:
            plan = plan_engines(facts, machine, by_device(share))
        except TooLargeError:
            continue
        assert plan.engine_bytes is not None
        assert plan.slots is None
        taken, used = taken + plan.engine_bytes, used + share
        # As if nobody else ran: neither more nor less.
        assert plan.engine_bytes <= (free - SERVER_BYTES) * share / slots
    assert taken + SERVER_BYTES <= free


@given(models(), SHARES, st.integers(1, 4), st.integers(1, 6), st.booleans())
def test_an_engine_is_sized_alike_however_many_are_wanted(
    facts: ModelFacts, share: float, slots: int, workers: int, scaling: bool
) -> None:
    machine = Machine(16, slots, 64 * GIB, 64 * GIB)
    wanted = Wanted(workers=workers, share=share, by_device=True)
    keys = (KV_BYTES, MAX_LEN)
    try:
        alone = plan_engines(facts, machine, by_device(share))
    except TooLargeError:
        with pytest.raises(TooLargeError):
            plan_engines(facts, machine, wanted)
        return
    several = plan_engines(facts, machine, wanted)
    assert {key: values(alone).get(key) for key in keys} == {key: values(several).get(key) for key in keys}
    assert alone.engine_bytes == several.engine_bytes


@given(models(), SHARES, st.integers(1, 4), st.integers(8, 180), st.integers(0, 180))
def test_engines_on_one_gpu_take_no_more_than_what_was_free(
    facts: ModelFacts, share: float, number: int, gib: int, free: int
) -> None:
    machine = gpus(number, gib * GIB, min(free, gib) * GIB)
    try:
        plan = plan_engines(facts, machine, by_device(share))
    except TooLargeError:
        return
    chosen = values(plan)
    beside = int((1 + 1e-6) / share)
    part = chosen.get(UTILIZATION, 0.92)
    assert beside * part <= 0.92
    assert beside * part * gib <= max(min(free, gib), 0.01)
    if share < 1:
        assert plan.ranks == 1
        assert chosen[KV_BYTES] + GPU_ENGINE_BYTES <= part * gib * GIB


def test_half_a_gpu_is_half_the_memory_that_engines_may_take() -> None:
    plan = plan_engines(QWEN3_SMALL, gpus(2, 24 * GIB), by_device(0.5))
    chosen = values(plan)
    assert chosen[UTILIZATION] == 0.46
    assert reason(plan, UTILIZATION) == "0.5 of the 92% of a GPU that engines may take"
    assert chosen[KV_BYTES] == int(24 * GIB * 0.46) - 1_192 * MIB - GPU_ENGINE_BYTES
    assert (
        reason(plan, KV_BYTES)
        == "what 1.2 GiB of weights and the rest leave of 46% of a GPU with 24.0 GiB, for 0.5 of it"
    )
    assert chosen[MAX_LEN] == 40960


def test_a_share_of_a_gpu_whose_memory_is_not_known_is_still_a_share() -> None:
    chosen = values(plan_engines(QWEN3_SMALL, Machine(0, gpu_count=1), by_device(0.25)))
    assert chosen[UTILIZATION] == 0.23
    assert KV_BYTES not in chosen


def test_half_a_slot_is_half_of_what_a_slot_has() -> None:
    machine = Machine(8, 4, 64 * GIB, 32 * GIB)
    plan = plan_engines(QWEN3_SMALL, machine, by_device(0.5))
    part = (int(32 * GIB * 0.95) - SERVER_BYTES) // 8
    assert plan.engine_bytes is not None
    assert plan.engine_bytes <= part
    assert values(plan)[KV_BYTES] <= part - 1_192 * MIB - ENGINE_BYTES
    assert (
        "32.0 GiB of memory was free at the server's start, for 4 CPU slots, of which each worker gets 0.5 of one"
        in (reason(plan, KV_BYTES))
    )
    whole = plan_engines(QWEN3_SMALL, machine, by_device())
    assert values(whole)[MAX_LEN] > values(plan)[MAX_LEN]


@pytest.mark.parametrize(
    ("machine", "wanted", "said"),
    [
        (
            Machine(8, 4, 16 * GIB, 8 * GIB),
            by_device(0.5),
            r"does not fit: 1.2 GiB of weights.* need 2.0 GiB in all, and 8.0 GiB of memory was free at the server's "
            r"start, for 4 CPU slots, of which each worker gets 0.5 of one, 0.8 GiB for each worker; give each worker "
            r"a larger part of a device, serve a smaller",
        ),
        (
            Machine(0, gpus=(Gpu(8 * GIB, 8 * GIB),), gpu_count=1),
            by_device(0.25),
            r"need 3.2 GiB in all, and 23% of a GPU with 8.0 GiB, for 0.25 of it, 1.8 GiB for each engine; give each",
        ),
        (
            gpus(1),
            by_device(0.5, gpu_memory_utilization=0.9),
            "0.9 is more than the share of a GPU .* gets, 0.5; leave",
        ),
        (gpus(1), by_device(0.5, kv_cache_memory_bytes="60G"), "KV cache of 60.0 GiB does not fit beside 1.2 GiB"),
        (Machine(8, 4, 64 * GIB, 64 * GIB), by_device(kv_cache_memory_bytes="20G"), "20.0 GiB does not fit beside"),
    ],
)
def test_what_does_not_fit_into_its_part_is_refused_with_figures(machine: Machine, wanted: Wanted, said: str) -> None:
    with pytest.raises(TooLargeError, match=said):
        plan_engines(QWEN3_SMALL, machine, wanted)


def test_a_share_is_of_one_gpu_even_where_several_would_have_room() -> None:
    with pytest.raises(TooLargeError, match=r"131.3 GiB of weights"):
        plan_engines(LLAMA_70B, gpus(8), by_device(0.5))
    assert plan_engines(LLAMA_70B, gpus(8), by_device()).ranks == 2


def test_workers_that_share_slots_need_fewer() -> None:
    machine = Machine(16, None, 64 * GIB, 64 * GIB)
    assert plan_engines(QWEN3_SMALL, machine, Wanted(workers=4, share=0.5)).slots == 4
    assert plan_engines(QWEN3_SMALL, machine, Wanted(workers=4)).slots == 8
    assert (
        plan_engines(QWEN3_SMALL, Machine(4, 4, 640 * GIB, 640 * GIB), Wanted(share=0.25, scaling=True)).most_engines
        == 16
    )
