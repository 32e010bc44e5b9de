"""Requests of earlier epochs in the pinned vLLM, part by part. test_fidelity.py has the whole."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import msgspec
import torch
from vllm import SamplingParams
from vllm.plugins import load_general_plugins
from vllm.sampling_params import StructuredOutputsParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from dynamo_local.core.errors import RequestError
from dynamo_local.core.messages.work import Submit
from dynamo_local.core.names import WATCHER_ENV
from dynamo_local.engine.vllm.patches.requests import continue_requests
from dynamo_local.engine.vllm.requests import wire
from dynamo_local.engine.vllm.requests.continuing import ACCEPTED, SeededSampling
from state.devices.allocation import DEVICES_VARIABLE
from state.devices.holding import NAMES, on_device
from tests.e2e.llm_server import PATIENCE_S

PROMPT, OUTPUT = [1, 2, 3, 4, 5], [6, 7, 8, 9, 8, 7]
MAX_TOKENS, MIN_TOKENS = 20, 15


@pytest.fixture(autouse=True)
def installed() -> None:
    continue_requests()


def core_request(
    output: Sequence[int] = OUTPUT, *, forgotten: tuple[str, ...] = (), **options: Any
) -> EngineCoreRequest:
    """Make the request as a worker does of a submission."""
    left = {"max_tokens": MAX_TOKENS - len(output), "min_tokens": MIN_TOKENS - len(output)}
    sampling = msgspec.msgpack.encode(SamplingParams(**{**left, **options}))
    context = [*PROMPT, *output]
    work = Submit("r", 2, "f", context, msgspec.Raw(sampling), position=len(output))
    return wire.core_request_of(work, forgotten=forgotten)


def block_hasher() -> Any:
    init_none_hash(sha256)
    return get_request_block_hasher(4, sha256)


def test_the_scheduler_has_it_as_one_that_it_resumes() -> None:
    hasher = block_hasher()
    resumed = Request.from_engine_core_request(core_request([]), hasher)
    for token in OUTPUT:
        resumed.append_output_token_ids(token)
    ours = Request.from_engine_core_request(core_request(), hasher)
    for name in ("prompt_token_ids", "max_tokens", "num_tokens", "num_output_tokens", "block_hashes"):
        assert getattr(ours, name) == getattr(resumed, name), name
    assert list(ours.output_token_ids) == OUTPUT
    assert ours.sampling_params is not None
    assert ours.sampling_params.min_tokens == MIN_TOKENS


def test_what_it_finds_in_the_cache_may_go_beyond_its_prompt() -> None:
    ours = Request.from_engine_core_request(core_request(), None)
    # As vLLM's scheduler does when it admits a request, and when the first token is there.
    assert ours.prefill_stats is not None
    ours.prefill_stats.set(ours.num_prompt_tokens, 8, 2)
    told = ours.take_prefill_stats()
    assert told is not None
    assert (told.num_cached_tokens, told.num_computed_tokens) == (10, 1)
    assert ours.num_prompt_tokens == len(PROMPT)


def test_the_second_model_runner_is_told_which_tokens_are_prompt() -> None:
    ours = Request.from_engine_core_request(core_request(), None)
    told = NewRequestData.from_request(ours, ([],), ours._all_token_ids)
    assert (told.prompt_token_ids, told.prompt_len, told.prefill_token_ids) == (PROMPT, 5, PROMPT + OUTPUT)


def state(request: EngineCoreRequest, generator: torch.Generator | None = None) -> CachedRequestState:
    """Make the state as vLLM's first model runner does of a request that is new to it."""
    return CachedRequestState(
        req_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        mm_features=[],
        sampling_params=request.sampling_params,
        generator=generator,
        block_ids=([],),
        num_computed_tokens=0,
        output_token_ids=[],
    )


def test_the_first_model_runner_has_its_output() -> None:
    ours = state(core_request())
    assert (ours.prompt_token_ids, ours.output_token_ids, ours.num_tokens) == (PROMPT, OUTPUT, 11)
    first = state(core_request([]))
    assert (first.output_token_ids, first.num_tokens) == ([], 5)


def draw(generator: torch.Generator) -> int:
    """Draw as vLLM's sampler does on a CPU."""
    return int(torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long).item())


def test_draws_go_on_where_they_were() -> None:
    undisturbed = torch.Generator().manual_seed(5)
    drawn = [draw(undisturbed) for _ in range(len(OUTPUT) + 2)]
    ours = state(core_request(seed=5), torch.Generator().manual_seed(5))
    assert isinstance(ours.generator, SeededSampling)
    assert draw(ours.generator) == drawn[-2]
    # As vLLM takes back what it has drawn for a part of a prompt.
    ours.generator.set_offset(ours.generator.get_offset() - 4)
    for number in drawn[-2:]:
        assert draw(ours.generator) == number
        ours.output_token_ids.append(0)


def test_a_seed_is_refused_where_it_cannot_be_rebuilt() -> None:
    core_request([], seed=5, forgotten=("seed",))
    core_request(seed=5, temperature=0, forgotten=("seed",))
    with pytest.raises(RequestError, match="the state of seed"):
        core_request(seed=5, forgotten=("seed",))


def test_nobody_else_can_say_what_earlier_epochs_have_brought() -> None:
    request = core_request([], extra_args={ACCEPTED: [9, 9]})
    assert request.sampling_params is not None
    assert request.sampling_params.extra_args is None


MODULE_OF_THE_HOOK = (
    "__import__('vllm.v1.worker.gpu_input_batch', fromlist=['*']).CachedRequestState.__post_init__.__module__"
)


def test_processes_that_vllm_spawns_continue_requests_and_are_on_their_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = f"GPU-{secrets.token_hex(8)}"
    monkeypatch.setenv(WATCHER_ENV, "w")
    monkeypatch.setenv(DEVICES_VARIABLE, device)
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=load_general_plugins) as pool:
        assert pool.submit(eval, MODULE_OF_THE_HOOK).result(PATIENCE_S) == continue_requests.__module__
        (mark,) = on_device(NAMES.bound(), device)
        assert f"/{pool.submit(os.getpid).result(PATIENCE_S)}-" in mark


class Reasoner:
    """Reasoning ends with a 7."""

    def __init__(self, **_: Any) -> None:
        pass

    def is_reasoning_end(self, token_ids: Sequence[int]) -> bool:
        return 7 in token_ids

    def is_reasoning_end_streaming(self, _: Sequence[int], delta_ids: Sequence[int]) -> bool:
        return 7 in delta_ids


class Grammar:
    def __init__(self) -> None:
        self.accepted: list[int] = []

    def accept_tokens(self, _: str, tokens: Sequence[int]) -> bool:
        self.accepted += tokens
        return 0 not in tokens


def manager(reasoner: type[Reasoner] | None) -> StructuredOutputManager:
    """vLLM's, without a tokenizer, whose grammars note what they are given."""
    bare: Any = StructuredOutputManager.__new__(StructuredOutputManager)
    bare._use_async_grammar_compilation = True
    bare.executor = ThreadPoolExecutor(1)
    bare.enable_in_reasoning = False
    bare.reasoner_cls = reasoner
    bare.tokenizer = None
    bare.backend = type("Backend", (), {"compile_grammar": lambda *_, **__: Grammar()})()
    made: StructuredOutputManager = bare
    return made


@pytest.mark.parametrize(("reasoner", "wanted"), [(None, OUTPUT), (Reasoner, [8, 9, 8, 7])])
def test_the_grammar_is_where_the_output_is(reasoner: type[Reasoner] | None, wanted: list[int]) -> None:
    options: dict[str, Any] = {"structured_outputs": StructuredOutputsParams(regex="a+")}
    step_by_step = Request.from_engine_core_request(core_request([], **options), None)
    ours = Request.from_engine_core_request(core_request(**options), None)
    found = []
    for request in (step_by_step, ours):
        its = manager(reasoner)
        its.grammar_init(request)
        structured = request.structured_output_request
        assert structured is not None
        its.executor.shutdown()
        if request is step_by_step:
            for token in OUTPUT:
                request.append_output_token_ids(token)
                assert its.accept_tokens(request, [token])
        grammar: Any = structured.grammar
        found.append((grammar.accepted, structured.reasoning_ended))
    assert found[0] == found[1]
    assert found[1][0] == wanted


def test_output_that_its_grammar_does_not_allow_fails_the_request() -> None:
    options: dict[str, Any] = {"structured_outputs": StructuredOutputsParams(regex="a+")}
    request = Request.from_engine_core_request(core_request([6, 0], **options), None)
    its = manager(None)
    its.grammar_init(request)
    its.executor.shutdown()
    assert request.structured_output_request is not None
    assert isinstance(request.structured_output_request.grammar, ValueError)
