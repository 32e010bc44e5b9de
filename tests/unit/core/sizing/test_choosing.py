"""Engine arguments that are chosen always fit, and nothing that the user gives is changed."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.errors import UsageError
from dynamo_local.core.sizing.choosing import (
    KV_BYTES,
    MAX_LEN,
    TENSOR_PARALLEL,
    EnginePlan,
    plan_engines,
    slots_for_endpoints,
)
from dynamo_local.core.sizing.machine import GIB, MIB, Gpu, Machine, Wanted, integer
from dynamo_local.core.sizing.memory import ENGINE_BYTES, GPU_ENGINE_BYTES, SERVER_BYTES, TooLargeError, loaded_bytes
from dynamo_local.core.sizing.model_facts import AttentionLayers, ModelFacts

QWEN3_SMALL = ModelFacts(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    weight_bytes=1_192 * MIB,
    weight_dtype="bfloat16",
    dtype="bfloat16",
    layers=28,
    heads=16,
    kv_heads=8,
    head_dim=128,
    max_position=40960,
    attention=(AttentionLayers(28, 2 * 8 * 128),),
)
LLAMA_70B = ModelFacts(
    model_type="llama",
    weight_bytes=141 * 10**9,
    weight_dtype="bfloat16",
    dtype="bfloat16",
    layers=80,
    heads=64,
    kv_heads=8,
    head_dim=128,
    max_position=131072,
    attention=(AttentionLayers(80, 2 * 8 * 128),),
)


def gpus(number: int, memory: int = 80 * GIB, free: int | None = None) -> Machine:
    return Machine(cores=0, gpus=(Gpu(memory, memory if free is None else free),) * number, gpu_count=number)


CPUS = Machine(cores=4, memory=16 * GIB, free=16 * GIB)


def values(plan: EnginePlan) -> dict[str, Any]:
    return {choice.key: choice.value for choice in plan.choices}


def reason(plan: EnginePlan, key: str) -> str:
    return next(choice.reason for choice in plan.choices if choice.key == key)


heads = st.sampled_from([(8, 8), (16, 2), (12, 4), (14, 2), (71, 1), (32, 8), (9, 3)])


@st.composite
def models(draw: st.DrawFn) -> ModelFacts:
    layers = draw(st.integers(1, 100))
    number, kv_heads = draw(heads)
    head_dim = draw(st.sampled_from([64, 128]))
    is_mla = draw(st.booleans())
    elements = 576 if is_mla else 2 * kv_heads * head_dim
    return ModelFacts(
        model_type="any",
        weight_bytes=draw(st.integers(1 * MIB, 200 * GIB)),
        weight_dtype=draw(st.sampled_from(["bfloat16", "float32", None])),
        dtype=draw(st.sampled_from(["bfloat16", "float32", "float16", None])),
        layers=layers,
        heads=number,
        kv_heads=kv_heads,
        is_mla=is_mla,
        max_position=draw(st.sampled_from([256, 2048, 40960, 131072, 1_000_000])),
        attention=(AttentionLayers(layers, elements, draw(st.sampled_from([None, 1024]))),),
    )


arguments = st.fixed_dictionaries(
    {},
    optional={
        MAX_LEN: st.sampled_from([128, 4096, "32k", "auto"]),
        KV_BYTES: st.sampled_from([64 * MIB, 2 * GIB, "4G"]),
        "dtype": st.sampled_from(["auto", "float32", "bfloat16"]),
        "max-num-seqs": st.just(7),
        "block-size": st.just(16),
        "enforce-eager": st.just(False),
        "kv-transfer": st.just(True),
    },
)
wishes = st.builds(
    Wanted,
    workers=st.integers(1, 4),
    prefill_workers=st.integers(0, 2),
    scaling=st.booleans(),
    given=arguments,
)


@given(models(), wishes, st.integers(1, 64), st.integers(0, 256 * GIB))
def test_what_is_chosen_for_cpus_fits(facts: ModelFacts, wanted: Wanted, cores: int, free: int) -> None:
    try:
        plan = plan_engines(facts, Machine(cores=cores, memory=free, free=free), wanted)
    except TooLargeError:
        return
    chosen = {**values(plan), **wanted.given}
    dtype = chosen.get("dtype", facts.dtype)
    dtype = facts.dtype if dtype == "auto" else dtype
    kv = integer(chosen[KV_BYTES])
    weights = loaded_bytes(facts, dtype)
    assert kv is not None
    assert weights is not None
    assert plan.most_engines >= wanted.engines
    engines = plan.most_engines if wanted.scaling else wanted.engines
    assert engines * (weights + ENGINE_BYTES + kv) + SERVER_BYTES <= free
    length = integer(chosen.get(MAX_LEN))
    token = facts.kv_bytes_per_token(4 if dtype == "float32" else 2)
    assert token is not None
    if length is not None:
        assert length * token <= kv
        assert length >= 1


@given(models(), wishes, st.integers(1, 8), st.integers(8, 180))
def test_what_is_chosen_for_gpus_fits(facts: ModelFacts, wanted: Wanted, number: int, gib: int) -> None:
    try:
        plan = plan_engines(facts, gpus(number, gib * GIB), wanted)
    except TooLargeError:
        return
    chosen = {**values(plan), **wanted.given}
    ranks = chosen[TENSOR_PARALLEL]
    assert plan.ranks == ranks
    assert facts.heads is not None
    assert facts.heads % ranks == 0
    dtype = chosen.get("dtype", "auto")
    weights = loaded_bytes(facts, facts.dtype if dtype == "auto" else dtype)
    assert weights is not None
    share = chosen.get("gpu-memory-utilization", 0.92)
    assert weights / ranks + GPU_ENGINE_BYTES <= gib * GIB * share
    # Where there are too few GPUs for all workers, those who hand out devices refuse, and name who has the others.
    assert ranks * wanted.engines <= number or ranks == 1


@given(models(), wishes, st.sampled_from([Machine(16, None, 64 * GIB, 64 * GIB), gpus(8)]))
def test_nothing_that_is_given_is_chosen(facts: ModelFacts, wanted: Wanted, machine: Machine) -> None:
    try:
        plan = plan_engines(facts, machine, wanted)
    except TooLargeError:
        return
    assert not set(wanted.given) & set(values(plan))
    assert all(choice.reason for choice in plan.choices)


@given(wishes, st.sampled_from([Machine(4), Machine(4, None, GIB, GIB), gpus(2), Machine(0, gpu_count=2)]))
def test_a_model_of_which_nothing_is_known_is_not_refused(wanted: Wanted, machine: Machine) -> None:
    assert plan_engines(ModelFacts(), machine, wanted).ranks == 1


def test_the_context_is_as_long_as_the_memory_allows() -> None:
    plan = plan_engines(QWEN3_SMALL, Machine(4, None, 8 * GIB, 11 * GIB // 2), Wanted())
    assert values(plan)[KV_BYTES] == GIB
    assert values(plan)[MAX_LEN] == 8192
    assert (
        reason(plan, MAX_LEN)
        == "KV for one request of 40960 tokens needs 4.4 GiB, and 1.0 GiB is for KV beside 1.2 GiB of weights"
    )


def test_with_enough_memory_the_context_is_that_of_the_model() -> None:
    plan = plan_engines(QWEN3_SMALL, Machine(4, None, 64 * GIB, 64 * GIB), Wanted())
    assert values(plan)[MAX_LEN] == 40960


@pytest.mark.parametrize(
    ("facts", "machine", "wanted", "said"),
    [
        (
            QWEN3_SMALL,
            Machine(4, None, 4 * GIB, 4 * GIB),
            Wanted(workers=4),
            "does not fit: 4 workers with 1.2 GiB of weights, .* 4.0 GiB of memory is free, 0.6 GiB for each worker",
        ),
        (
            QWEN3_SMALL,
            Machine(4, None, 8 * GIB, 6 * GIB),
            Wanted(given={MAX_LEN: 40960}),
            "KV cache for 40960 tokens.* need 6.3 GiB in all",
        ),
        (
            QWEN3_SMALL,
            Machine(4, None, 8 * GIB, 8 * GIB),
            Wanted(given={KV_BYTES: "1G", MAX_LEN: "32k"}),
            "max-model-len 32000 does not fit: its KV cache needs 3.4 GiB.*use at most --max-model-len 8192",
        ),
        (LLAMA_70B, gpus(1), Wanted(), "does not fit: 131.3 GiB of weights"),
        (LLAMA_70B, gpus(4), Wanted(workers=4), "does not fit: 131.3 GiB of weights"),
    ],
)
def test_what_does_not_fit_is_refused_with_figures(
    facts: ModelFacts, machine: Machine, wanted: Wanted, said: str
) -> None:
    with pytest.raises(TooLargeError, match=said):
        plan_engines(facts, machine, wanted)


def test_a_part_of_the_memory_is_taken_as_it_is_given() -> None:
    machine = Machine(4, None, 16 * GIB, 16 * GIB)
    plan = plan_engines(QWEN3_SMALL, machine, Wanted(given={"gpu-memory-utilization": 0.5}))
    assert values(plan)[KV_BYTES] == 8 * GIB - 1_192 * MIB - ENGINE_BYTES
    assert values(plan)[MAX_LEN] == 40960
    with pytest.raises(TooLargeError, match=r"KV cache of 14.1 GiB does not fit .* --gpu-memory-utilization"):
        plan_engines(QWEN3_SMALL, machine, Wanted(given={"gpu-memory-utilization": 1.0}))


@pytest.mark.parametrize("kv", ["1M", 0, "83M"])
def test_a_kv_cache_without_room_for_a_context_is_refused(kv: object) -> None:
    with pytest.raises(TooLargeError, match="too small: 512 tokens need 84 MiB; make it larger"):
        plan_engines(QWEN3_SMALL, Machine(4, None, 16 * GIB, 16 * GIB), Wanted(given={KV_BYTES: kv}))


@pytest.mark.parametrize("key", [MAX_LEN, KV_BYTES, "max-num-batched-tokens"])
@pytest.mark.parametrize("value", ["abc", "4kk", "-5", ""])
def test_what_is_no_number_is_refused(key: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"{key}: '{value}' is not a number"):
        plan_engines(QWEN3_SMALL, Machine(4), Wanted(given={key: value}))


def test_requests_wait_where_the_planner_is_to_add_workers() -> None:
    machine = Machine(4, None, 16 * GIB, 16 * GIB)
    plan = plan_engines(QWEN3_SMALL, machine, Wanted(scaling=True))
    assert values(plan)["max-num-seqs"] == 16
    assert "adds a worker when requests wait" in reason(plan, "max-num-seqs")
    given = plan_engines(QWEN3_SMALL, machine, Wanted(scaling=True, given={"max-num-seqs": 64}))
    assert "max-num-seqs" not in values(given)


LENGTH_OF_RANDOM = ModelFacts(max_position=8192, longest_given=8192)


def test_a_context_beyond_the_model_is_refused_with_figures() -> None:
    said = "max-model-len 32000 is more than the model has: its context ends at 8192 tokens; use at most .* 8192"
    for machine in (Machine(4), gpus(1)):
        with pytest.raises(TooLargeError, match=said):
            plan_engines(LENGTH_OF_RANDOM, machine, Wanted(given={MAX_LEN: "32k"}))


@pytest.mark.parametrize(
    "wanted",
    [
        Wanted(given={MAX_LEN: 8192}),
        Wanted(given={MAX_LEN: "auto"}),
        Wanted(given={MAX_LEN: "32k"}, any_length=True),
        Wanted(given={MAX_LEN: "32k", "hf-overrides": {"rope_parameters": {"factor": 4.0}}}),
    ],
)
def test_a_context_that_vllm_takes_is_not_refused(wanted: Wanted) -> None:
    assert plan_engines(LENGTH_OF_RANDOM, Machine(4), wanted).ranks == 1


def test_as_few_gpus_as_have_room_are_taken_for_each_worker() -> None:
    assert values(plan_engines(QWEN3_SMALL, gpus(8), Wanted()))[TENSOR_PARALLEL] == 1
    plan = plan_engines(LLAMA_70B, gpus(8), Wanted(workers=2))
    assert values(plan)[TENSOR_PARALLEL] == 2
    assert "and not on fewer" in reason(plan, TENSOR_PARALLEL)


def test_a_gpu_that_others_use_gives_what_is_free() -> None:
    plan = plan_engines(QWEN3_SMALL, gpus(1, 80 * GIB, 40 * GIB), Wanted())
    assert values(plan)["gpu-memory-utilization"] == 0.49
    assert reason(plan, "gpu-memory-utilization") == "40.0 GiB of 80.0 GiB is free on one of the GPUs"


def test_cores_are_shared_by_the_workers_and_as_many_more() -> None:
    assert plan_engines(QWEN3_SMALL, Machine(16, None, 64 * GIB, 64 * GIB), Wanted(workers=2)).slots == 4
    assert plan_engines(QWEN3_SMALL, Machine(2, None, 64 * GIB, 64 * GIB), Wanted(workers=2)).slots == 2
    assert plan_engines(QWEN3_SMALL, Machine(16, 8, 64 * GIB, 64 * GIB), Wanted(workers=2)).slots is None


def test_the_planner_gets_no_more_workers_than_memory() -> None:
    plan = plan_engines(QWEN3_SMALL, Machine(64, 64, 16 * GIB, 16 * GIB), Wanted(scaling=True))
    assert 1 < plan.most_engines < 8


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (ModelFacts(sliding_window=512), "the model has layers with a sliding window"),
        (ModelFacts(has_recurrent_state=True), "the model has layers without a KV cache"),
        (ModelFacts(is_mla=True), "not with latent attention on a CPU"),
    ],
)
def test_models_whose_kv_cannot_be_transferred_go_without(facts: ModelFacts, why: str) -> None:
    plan = plan_engines(facts, Machine(4), Wanted())
    assert values(plan)["kv-transfer"] is False
    assert reason(plan, "kv-transfer") == why


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (4096, 4096),
        ("4k", 4000),
        ("4K", 4096),
        ("1.5m", 1_500_000),
        ("2G", 2 * GIB),
        ("auto", None),
        (-1, None),
        ("-1", None),
        (True, None),
        (None, None),
        ("", None),
        ("k", None),
        ("inf", None),
    ],
)
def test_numbers_are_read_as_vllm_reads_them(text: object, number: int | None) -> None:
    assert integer(text) == number


BERT = ModelFacts(
    architecture="BertModel",
    model_type="bert",
    weight_bytes=440 * MIB,
    weight_dtype="float32",
    dtype="float32",
    max_position=512,
    attention=(),
    is_encoder=True,
    pools=True,
)


@pytest.mark.parametrize("facts", [BERT, replace(QWEN3_SMALL, pools=True)], ids=["encoder", "decoder"])
def test_a_pooling_model_hands_no_kv_over_and_takes_many_inputs(facts: ModelFacts) -> None:
    for machine in (CPUS, gpus(1)):
        chosen = values(plan_engines(facts, machine, Wanted()))
        assert chosen["kv-transfer"] is False
        assert chosen["max-requests"] >= 2048
        assert "block-size" not in chosen


def test_an_encoder_takes_no_memory_for_kv_and_its_length_is_vllms() -> None:
    chosen = values(plan_engines(BERT, CPUS, Wanted()))
    assert chosen[KV_BYTES] < 100 * MIB
    assert MAX_LEN not in chosen


@pytest.mark.parametrize(
    ("given", "pools"),
    [({}, False), ({"runner": "pooling"}, True), ({"convert": "embed"}, True), ({"convert": "none"}, False)],
)
def test_the_user_may_make_a_pooling_model_of_one_that_generates(given: dict[str, Any], pools: bool) -> None:
    chosen = values(plan_engines(QWEN3_SMALL, CPUS, Wanted(given=given)))
    assert ("max-requests" in chosen) is pools
    assert chosen["kv-transfer"] is not pools
    told = values(plan_engines(BERT, CPUS, Wanted(given={"runner": "generate"})))
    assert "max-requests" not in told


@pytest.mark.parametrize(
    ("least", "most", "cores", "slots"),
    [
        (0, 0, 2, 4),  # some can be created later
        (3, 3, 2, 4),  # one for updates, though cores are shared
        (3, 3, 16, 4),  # large slots where nobody needs more
        (2, 6, 16, 7),
        (2, 40, 16, 16),  # more than the least takes no core from it
        (7, 7, 2, 8),
        (200, 200, 2, 8),  # refused by whoever looks after endpoints
    ],
)
def test_slots_for_endpoints(least: int, most: int, cores: int, slots: int) -> None:
    choice = slots_for_endpoints(least, most, cores)
    assert choice.value == slots
    shared = f"which share {cores} cores" if slots > cores else f"{cores // slots} cores? each, of {cores}"
    assert re.match(rf"{shared}: {least} for the workers at the start, \d+ for updates", choice.reason)


def test_endpoints_get_slots_beside_a_model() -> None:
    assert plan_engines(QWEN3_SMALL, Machine(2, None, 64 * GIB, 64 * GIB), Wanted(endpoint_slots=3)).slots == 4
    assert plan_engines(QWEN3_SMALL, Machine(2, None, 64 * GIB, 64 * GIB), Wanted(endpoint_slots=90)).slots == 8
    assert plan_engines(QWEN3_SMALL, Machine(16, None, 64 * GIB, 64 * GIB), Wanted(endpoint_slots=1)).slots == 2
