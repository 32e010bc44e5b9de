"""Every field of the pinned vLLM's types that cross between its server and its engines, and what becomes of it here.

A field that a later vLLM adds fails a test until somebody has decided. (Sampling parameters: test_fidelity.py.)
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import msgspec
import numpy as np
import torch
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.pooling_params import LateInteractionParams, PoolingParams
from vllm.reasoning import ReasoningParserManager
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
)
from vllm.v1.metrics.stats import PrefillStats, SchedulerStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from dynamo_local.core import codec
from dynamo_local.core.errors import BadRequestError, RequestError
from dynamo_local.core.messages.work import FinishReason as Finish
from dynamo_local.core.messages.work import RequestEpoch, Submit, TokenBatch
from dynamo_local.engine.vllm.arguments import MANAGED
from dynamo_local.engine.vllm.requests import wire

What = Literal["carried", "derived", "refused", "meaningless"]
"""Carried as it is; made anew at the other end; refused to clients, or in the configuration; of no use to anybody."""

Fields = dict[str, tuple[What, str]]

REQUEST: Fields = {
    "request_id": ("derived", "the engine knows it by its epoch as well"),
    "prompt_token_ids": ("carried", ""),
    "mm_features": ("refused", "multimodal prompts"),
    "sampling_params": ("carried", "see test_fidelity.py"),
    "pooling_params": ("carried", ""),
    "arrival_time": ("carried", ""),
    "lora_request": ("derived", "its name is carried, each worker knows what that stands for"),
    "cache_salt": ("carried", ""),
    "data_parallel_rank": ("meaningless", "a worker is one rank, and the router chooses it"),
    "prompt_embeds": ("refused", "only prompts of tokens"),
    "prompt_is_token_ids": ("meaningless", "comes with prompt_embeds"),
    "client_index": ("meaningless", "an engine has one client, its worker"),
    "current_wave": ("meaningless", "of data parallel engines that step together"),
    "priority": ("carried", ""),
    "trace_headers": ("carried", ""),
    "resumable": ("derived", "by the worker, for its warm requests; refused to clients"),
    "external_req_id": ("derived", "as request_id"),
    "reasoning_ended": ("carried", ""),
    "reasoning_parser_kwargs": ("carried", ""),
    "abort_immediately": ("meaningless", "of vLLM's own transfer of KV, which is not used"),
    "session_id": ("carried", ""),
    "kv_hints": ("refused", "they steer the machinery"),
}

OUTPUT: Fields = {
    "request_id": ("derived", "without its epoch"),
    "new_token_ids": ("carried", ""),
    "new_logprobs": ("carried", ""),
    "new_prompt_logprobs_tensors": ("carried", ""),
    "pooling_output": ("carried", ""),
    "finish_reason": ("carried", ""),
    "stop_reason": ("carried", ""),
    "events": ("carried", ""),
    "kv_transfer_params": ("meaningless", "clients may not set them, and the connector here answers with none"),
    "ec_transfer_params": ("meaningless", "clients may not set them"),
    "trace_headers": ("derived", "the frontend has those of the request; on the worker they tell the cause of an end"),
    "prefill_stats": ("derived", "of the cached tokens and the prompt's length"),
    "routed_experts": ("refused", "enable-return-routed-experts is no setting here"),
    "num_nans_in_logits": ("meaningless", "vLLM's server does not read it"),
    "mm_cache_miss_hashes": ("meaningless", "multimodal prompts are refused"),
    "new_sampling_mask": ("refused", "return-sampling-mask is no setting here"),
    "spec_decode_metrics": ("refused", "per-request-spec-decode-metrics is no setting here"),
    "prompt_token_id_logprobs": ("meaningless", "prompt_logprob_token_ids is refused"),
}

OUTPUTS: Fields = {
    "engine_index": ("meaningless", "an engine is one worker's"),
    "outputs": ("carried", "see above"),
    "scheduler_stats": ("derived", "a worker's load, see below"),
    "timestamp": ("carried", "all processes have one clock"),
    "utility_output": ("meaningless", "answers to the worker's own calls, which stay there"),
    "finished_requests": ("meaningless", "of data parallel engines"),
    "wave_complete": ("meaningless", "of data parallel engines"),
    "start_wave": ("meaningless", "of data parallel engines"),
    "weight_version": ("meaningless", "weights are not exchanged while the server runs"),
}

SCHEDULER: Fields = {
    "num_running_reqs": ("derived", "Load.running"),
    "num_waiting_reqs": ("derived", "Load.waiting"),
    "num_skipped_waiting_reqs": ("meaningless", "they wait for KV or a grammar, and for no room"),
    "num_kv_fetch_reqs_by_stage": ("meaningless", "counted by the worker that pulls"),
    "step_counter": ("meaningless", "of data parallel engines"),
    "current_wave": ("meaningless", "of data parallel engines"),
    "kv_cache_usage": ("derived", "Load.kv_usage"),
    "iteration_details": ("meaningless", "for vLLM's log"),
    "prefix_cache_stats": ("meaningless", "cached tokens come with each request"),
    "connector_prefix_cache_stats": ("meaningless", "as above"),
    "kv_cache_eviction_events": ("meaningless", "for vLLM's metrics of one engine"),
    "spec_decoding_stats": ("meaningless", "for vLLM's metrics of one engine"),
    "kv_connector_stats": ("derived", "Load.kv_usage and Load.kv_pinned"),
    "ec_connector_stats": ("derived", "changes of the prefix cache (kv/cache_changes.py); there is no such connector"),
    "waiting_lora_adapters": ("meaningless", "for vLLM's metrics of one engine"),
    "running_lora_adapters": ("meaningless", "for vLLM's metrics of one engine"),
    "cudagraph_stats": ("meaningless", "for vLLM's log"),
    "perf_stats": ("meaningless", "for vLLM's log"),
}

PREFILL: Fields = {
    "num_prompt_tokens": ("derived", "known to the frontend"),
    "num_computed_tokens": ("derived", "the rest of the prompt"),
    "num_cached_tokens": ("carried", ""),
    "num_local_cached_tokens": ("derived", "to a client, KV that was pulled is cached as any other"),
    "num_external_cached_tokens": ("derived", "as above"),
    "num_cache_creation_tokens": ("carried", ""),
}

ADAPTER: Fields = {
    "lora_name": ("carried", ""),
    "lora_int_id": ("derived", "each worker's own"),
    "lora_path": ("derived", "of the worker's configuration, or of the board of endpoints"),
    "base_model_name": ("meaningless", "for the list of models, which the frontend makes"),
    "load_inplace": ("meaningless", "adapters are loaded at the start"),
    "is_3d_lora_weight": ("derived", "of the worker's configuration"),
}

LOGPROBS: Fields = {
    "logprob_token_ids": ("carried", ""),
    "logprobs": ("carried", ""),
    "sampled_token_ranks": ("carried", ""),
    "cu_num_generated_tokens": ("meaningless", "where each request's part begins: it is one request's"),
}

PROMPT_LOGPROBS: Fields = {
    "logprob_token_ids": ("carried", ""),
    "logprobs": ("carried", ""),
    "selected_token_ranks": ("carried", ""),
    "cu_num_generated_tokens": ("meaningless", "as above"),
    "cu_num_generated_tokens_tensor": ("meaningless", "as above"),
}

POOLING: Fields = {
    "use_activation": ("carried", ""),
    "dimensions": ("carried", ""),
    "step_tag_id": ("carried", ""),
    "returned_token_ids": ("carried", ""),
    "task": ("carried", ""),
    "requires_token_ids": ("carried", ""),
    "skip_reading_prefix_cache": ("carried", ""),
    "late_interaction_params": ("refused", "the engine with the query would have to compute the documents"),
    "extra_kwargs": ("refused", "plugins"),
    "output_kind": ("carried", ""),
}

EVENT: Fields = {"type": ("carried", ""), "timestamp": ("carried", "")}

TYPES: list[tuple[Any, Fields]] = [
    (EngineCoreRequest, REQUEST),
    (PoolingParams, POOLING),
    (EngineCoreOutput, OUTPUT),
    (EngineCoreOutputs, OUTPUTS),
    (EngineCoreEvent, EVENT),
    (SchedulerStats, SCHEDULER),
    (PrefillStats, PREFILL),
    (LoRARequest, ADAPTER),
    (LogprobsLists, LOGPROBS),
    (LogprobsTensors, PROMPT_LOGPROBS),
]


def fields_of(kind: Any) -> set[str]:
    if dataclasses.is_dataclass(kind):
        return {field.name for field in dataclasses.fields(kind)}
    names: tuple[str, ...] = getattr(kind, "__struct_fields__", None) or kind._fields
    return set(names)


@pytest.mark.parametrize(("kind", "fields"), TYPES, ids=lambda value: getattr(value, "__name__", ""))
def test_what_becomes_of_every_field_is_known(kind: Any, fields: Fields) -> None:
    assert fields_of(kind) == set(fields)
    assert all(why for what, why in fields.values() if what != "carried")


def test_all_ends_have_a_name_here() -> None:
    assert {reason.name.lower() for reason in FinishReason} == set(Finish.__args__)  # type: ignore[attr-defined]
    assert set(wire._FINISH.values()) == set(FinishReason)


PARAMS = SamplingParams(temperature=0.5, seed=3, max_tokens=7)

ASKED: dict[str, Any] = {
    "prompt_token_ids": [1, 2, 3],
    "sampling_params": PARAMS,
    "arrival_time": 1.5,
    "cache_salt": "salt",
    "priority": -3,
    "trace_headers": {"traceparent": "00-1-2-01", "tracestate": "a=b"},
    "reasoning_ended": False,
    "reasoning_parser_kwargs": {"chat_template_kwargs": {"thinking": True, "depth": [1, {"more": None}]}},
    "session_id": "session",
}
POOLED: dict[str, Any] = {
    "use_activation": False,
    "dimensions": 32,
    "step_tag_id": 5,
    "returned_token_ids": [1, 2],
    "task": "token_embed",
    "requires_token_ids": True,
    "skip_reading_prefix_cache": True,
    "output_kind": RequestOutputKind.FINAL_ONLY,
}
"""A value for each field that is carried, and for no other."""

BARE: dict[str, Any] = {
    "request_id": "r",
    "prompt_token_ids": [1],
    "mm_features": None,
    "sampling_params": SamplingParams(),
    "pooling_params": None,
    "arrival_time": 0.0,
    "lora_request": None,
    "cache_salt": None,
    "data_parallel_rank": None,
}


def core_request(**changes: Any) -> EngineCoreRequest:
    without = {"sampling_params": None} if "pooling_params" in changes else {}
    return EngineCoreRequest(**{**BARE, **changes, **without})


def through_the_bus(asked: EngineCoreRequest) -> EngineCoreRequest:
    ours = wire.request_of(asked)
    work = Submit(
        request_id=ours.request_id,
        epoch=1,
        frontend="f",
        token_ids=list(ours.prompt_token_ids),
        sampling=msgspec.Raw(ours.sampling(0)),
        arrival_time=ours.arrival_time,
        priority=ours.priority,
        cache_salt=ours.cache_salt,
        reasoning_ended=ours.reasoning_ended,
        reasoning_parser_kwargs=ours.reasoning_parser_kwargs,
        session_id=ours.session_id,
        trace_headers=None if ours.trace_headers is None else dict(ours.trace_headers),
        pools=ours.pools,
    )
    return wire.core_request_of(codec.decode(codec.encode(work), Submit))


@pytest.mark.parametrize("name", [name for name, (what, _) in POOLING.items() if what == "carried"])
def test_a_field_of_pooling_parameters_that_is_carried_arrives(name: str) -> None:
    asked = {field: value for field, value in ASKED.items() if field != "sampling_params"}
    for params in (PoolingParams(**{"task": "embed", name: POOLED[name]}), PoolingParams(**POOLED)):
        there = through_the_bus(core_request(**asked, pooling_params=params))
        assert there.sampling_params is None
        assert getattr(there.pooling_params, name) == POOLED[name]
        assert (there.priority, there.cache_salt) == (ASKED["priority"], ASKED["cache_salt"])


@pytest.mark.parametrize(
    "asked", [{"late_interaction_params": LateInteractionParams("q", "k")}, {"extra_kwargs": {"a": 1}}]
)
def test_pooling_parameters_that_are_refused_are(asked: dict[str, Any]) -> None:
    with pytest.raises(BadRequestError):
        wire.request_of(core_request(pooling_params=PoolingParams(task="embed", **asked)))


def pooling(task: Any, tasks: tuple[Any, ...]) -> None:
    ours = wire.request_of(core_request(pooling_params=PoolingParams(task=task)))
    wire.core_request_of(Submit("r", 1, "f", [1], msgspec.Raw(ours.sampling(0)), pools=True), tasks=tasks)


def test_an_engine_gets_only_what_it_can_do() -> None:
    """Of another task, the engine core would die."""
    pooling("embed", ("embed", "token_embed"))
    with pytest.raises(RequestError, match="does not do 'classify', but embed"):
        pooling("classify", ("embed", "token_embed"))
    generation = Submit("r", 1, "f", [1], msgspec.Raw(msgspec.msgpack.encode(SamplingParams())))
    wire.core_request_of(generation, tasks=("generate",))
    with pytest.raises(RequestError, match="does not generate"):
        wire.core_request_of(generation, tasks=("embed",))


def test_garbage_for_pooling_parameters_is_one_requests_failure() -> None:
    for garbage in (b"\x01", b"\x80", b"\x91\xa1a", msgspec.msgpack.encode([None, None, None, None, "score"])):
        with pytest.raises(RequestError):
            wire.core_request_of(Submit("r", 1, "f", [1], msgspec.Raw(garbage), pools=True))


@pytest.mark.parametrize(
    "name", [name for name, (what, _) in REQUEST.items() if what == "carried" and name != "pooling_params"]
)
def test_a_field_of_a_request_that_is_carried_arrives(name: str) -> None:
    there = through_the_bus(core_request(**{name: ASKED[name]}))
    assert getattr(there, name) == ASKED[name]
    assert getattr(through_the_bus(core_request(**ASKED)), name) == ASKED[name]


REFUSED: dict[str, Any] = {
    "mm_features": [object()],
    "prompt_embeds": torch.zeros(1),
    "kv_hints": object(),
    "resumable": True,
}


@pytest.mark.parametrize("name", [*(name for name, (what, _) in REQUEST.items() if what == "refused"), "resumable"])
def test_a_field_of_a_request_that_is_refused_is(name: str) -> None:
    with pytest.raises(BadRequestError):
        wire.request_of(core_request(**{name: REFUSED[name]}))
    with pytest.raises(BadRequestError):
        wire.request_of(core_request(**{name: REFUSED[name]}, pooling_params=PoolingParams(task="embed")))


@pytest.mark.parametrize("kwargs", [{"big": 2**70}, {"deep": {}}])
def test_template_arguments_that_cannot_be_packed_are_the_requests_own_fault(kwargs: dict[str, Any]) -> None:
    for _ in range(5000 if "deep" in kwargs else 0):
        kwargs["deep"] = {"deep": kwargs["deep"]}
    with pytest.raises(BadRequestError, match="chat_template_kwargs"):
        wire.request_of(core_request(reasoning_parser_kwargs={"chat_template_kwargs": kwargs}))


def test_garbage_for_the_parsers_arguments_is_one_requests_failure() -> None:
    sampling = msgspec.Raw(msgspec.msgpack.encode(SamplingParams()))
    work = Submit("r", 1, "f", [1], sampling, reasoning_parser_kwargs=b"\x01")
    with pytest.raises(RequestError):
        wire.core_request_of(work)


class _Words:
    """A tokenizer, as far as a reasoning parser asks."""

    def get_vocab(self) -> dict[str, int]:
        return {"<think>": 7, "</think>": 8}

    def __len__(self) -> int:
        return 10


@pytest.mark.parametrize("thinking", [True, False])
def test_the_engine_knows_whether_the_prompt_lets_the_model_think(thinking: bool) -> None:
    """Else the grammar of a structured output begins inside the thinking."""
    asked = {"chat_template_kwargs": {"thinking": thinking}}
    there = through_the_bus(core_request(reasoning_parser_kwargs=asked)).reasoning_parser_kwargs
    parser: Any = ReasoningParserManager.get_reasoning_parser("deepseek_v3")
    assert there is not None
    ends = parser(tokenizer=_Words(), **there).is_reasoning_end_streaming([1, 7, 3], [3])
    assert ends is not thinking


def stats_of(cached: int) -> PrefillStats:
    stats = PrefillStats()
    stats.set(10, cached, 0)
    stats.finalize(8)
    return stats


def lists() -> LogprobsLists:
    ids, values = np.array([[5, 1]], dtype=np.int32), np.array([[-0.1, -2.0]], dtype=np.float32)
    return LogprobsLists(ids, values, np.array([1], dtype=np.int32))


TOLD: dict[str, Any] = {
    "new_token_ids": [5, 6],
    "new_logprobs": lists(),
    "new_prompt_logprobs_tensors": LogprobsTensors(
        torch.tensor([[1, 2]]), torch.tensor([[-0.5, -0.25]]), torch.tensor([1])
    ),
    "pooling_output": torch.tensor([0.25, -1.5]),
    "finish_reason": FinishReason.REPETITION,
    "stop_reason": 17,
    "events": [EngineCoreEvent(EngineCoreEventType.SCHEDULED, 12.25)],
}
"""A value for each field of an output that is carried, and for no other."""


def back(output: EngineCoreOutput) -> EngineCoreOutput:
    delta = wire.delta_of(output, RequestEpoch("r", 1), 0, 20.0)
    batch = TokenBatch(worker="w", seq=1, deltas=(delta,))
    (there,) = codec.decode(codec.encode(batch), TokenBatch).deltas
    return wire.core_output_of(there, 20.0, 10, {"traceparent": "00"})


def plain(value: Any) -> Any:
    """Without the arrays, which do not compare."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [array.tolist() for array in value[:3]] if isinstance(value, LogprobsLists | LogprobsTensors) else value


@pytest.mark.parametrize("name", [name for name, (what, _) in OUTPUT.items() if what == "carried"])
def test_a_field_of_an_output_that_is_carried_arrives(name: str) -> None:
    output = EngineCoreOutput(request_id="r#1", **{"new_token_ids": [5], name: TOLD[name]})
    assert plain(getattr(back(output), name)) == plain(TOLD[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3,), (2, 3), (0, 3)])
def test_every_number_of_a_pooled_output_arrives(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    output = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    there = back(EngineCoreOutput("r#1", [], finish_reason=FinishReason.STOP, pooling_output=output)).pooling_output
    assert there is not None
    assert there.dtype == torch.float32
    assert torch.equal(there.to(dtype), output)


def test_fields_of_an_output_that_are_made_anew() -> None:
    there = back(EngineCoreOutput(request_id="r#1", new_token_ids=[5], prefill_stats=stats_of(4)))
    assert there.request_id == "r"
    assert there.prefill_stats == stats_of(4)
    assert there.trace_headers == {"traceparent": "00"}


@pytest.mark.parametrize("name", ["routed_experts", "new_sampling_mask", "spec_decode_metrics"])
def test_outputs_that_would_be_lost_cannot_be_asked_for(name: str) -> None:
    what, why = OUTPUT[name]
    assert what == "refused"
    assert why.split()[0] in MANAGED
