"""Conversion between vLLM's types and the messages of the bus, both ways.

Numbers stay exact: arrays travel as their bytes. Nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
)
from vllm.v1.metrics.stats import PrefillStats, SchedulerStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from dynamo_local.core.errors import BadRequestError, RequestError
from dynamo_local.core.messages.presence import Load
from dynamo_local.core.messages.tokens import Array, Logprobs, TokenDelta
from dynamo_local.core.messages.tokens import FinishReason as Finish
from dynamo_local.core.messages.work import RequestEpoch, Submit
from dynamo_local.core.ports import Request, Sampling
from dynamo_local.core.request.fidelity import Fidelity
from dynamo_local.engine.vllm.kv.pull.messages import PullCounts
from dynamo_local.engine.vllm.requests.faults import cause_of
from dynamo_local.engine.vllm.requests.fidelity import is_of_context, survival_of
from dynamo_local.engine.vllm.requests.lora import NO_ADAPTERS, Adapters

_sampling_decoder = msgspec.msgpack.Decoder(SamplingParams)
_sampling_encoder = msgspec.msgpack.Encoder()

_TRANSFER = "kv_transfer_params"

ACCEPTED = "dynamo_local_accepted"
"""Extra argument: the tokens of earlier epochs (patches/requests/continued.py)."""

_FINISH: dict[Finish, FinishReason] = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
    "error": FinishReason.ERROR,
    "repetition": FinishReason.REPETITION,
}
_FINISH_NAMES: dict[FinishReason, Finish] = {reason: name for name, reason in _FINISH.items()}


def request_of(core_request: EngineCoreRequest, *, lora: bool = False) -> Request:
    """Convert a request of vLLM's OpenAI server to one of ours. `lora`: the engines can have LoRA adapters. Raises
    BadRequestError for what cannot be carried."""
    params = core_request.sampling_params
    if params is None or core_request.prompt_token_ids is None or core_request.prompt_embeds is not None:
        raise BadRequestError("only generation from token prompts is supported")
    if core_request.mm_features:
        raise BadRequestError("multimodal prompts are not supported")
    if params.prompt_logprob_token_ids is not None:
        raise BadRequestError("prompt_logprob_token_ids is not supported")
    if core_request.kv_hints is not None:
        raise BadRequestError("kv_hints is not supported")
    if core_request.resumable:
        raise BadRequestError("prompts that are sent in parts are not supported")
    if lora:
        _check_beside_adapters(params)
    return Request(
        request_id=core_request.request_id,
        prompt_token_ids=core_request.prompt_token_ids,
        sampling=_sampling_at(params),
        arrival_time=core_request.arrival_time,
        priority=core_request.priority,
        cache_salt=core_request.cache_salt,
        adapter=None if core_request.lora_request is None else core_request.lora_request.lora_name,
        reasoning_ended=core_request.reasoning_ended,
        reasoning_parser_kwargs=_packed(core_request.reasoning_parser_kwargs),
        session_id=core_request.session_id,
        trace_headers=core_request.trace_headers,
        survival=survival_of(params),
        max_tokens=params.max_tokens,
        # For log-probabilities of the prompt, vLLM computes it whole, whatever is cached.
        prefill_elsewhere=params.prompt_logprobs is None,
    )


def _packed(kwargs: dict[str, Any] | None) -> bytes | None:
    """Encode a client's arguments of the chat template. Raises BadRequestError."""
    if kwargs is None:
        return None
    try:
        return msgspec.msgpack.encode(kwargs)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BadRequestError(f"chat_template_kwargs cannot be sent to an engine: {error}") from error


def _sampling_at(params: SamplingParams) -> Sampling:
    def encode(position: int, at_most: int | None = None) -> bytes:
        if position == 0 and at_most is None:
            return _sampling_encoder.encode(params)
        rest = params.clone()
        limits = [params.max_tokens - position] if params.max_tokens is not None else []
        limits += [at_most] if at_most is not None else []
        rest.max_tokens = min(limits, default=None)
        rest.min_tokens = min([max(params.min_tokens - position, 0), *limits])
        if position > 0:
            # The first epoch, whose prompt was the client's, has sent them.
            rest.prompt_logprobs = None
        return _sampling_encoder.encode(rest)

    return encode


def core_request_of(
    work: Submit,
    transfer: dict[str, Any] | None = None,
    forgotten: Collection[str] = (),
    *,
    adapters: Adapters = NO_ADAPTERS,
    stays: bool = False,
) -> EngineCoreRequest:
    """A submission as vLLM's engine core takes it, its id made of request and epoch. Raises RequestError.

    `transfer` tells the KV connector what to do with it, and ACCEPTED the engine what earlier epochs have brought;
    nothing else that the submission says may. `forgotten` are parameters whose state this engine cannot rebuild.
    `stays`: it waits for more input when it has finished.
    """
    try:
        params = _sampling_decoder.decode(work.sampling)
    except VLLMClientError as error:
        raise BadRequestError(str(error)) from error
    except (msgspec.DecodeError, ValueError) as error:
        raise RequestError(f"the sampling parameters cannot be read: {error}") from error
    if adapters.enabled:
        _check_beside_adapters(params)
    begin = len(work.token_ids) - work.position
    prompt, accepted = work.token_ids[:begin], work.token_ids[begin:]
    if accepted:
        _continue(params, accepted, forgotten)
    ours: dict[str, Any] = {_TRANSFER: transfer, ACCEPTED: accepted}
    theirs = {name: value for name, value in (params.extra_args or {}).items() if name not in ours}
    params.extra_args = {**theirs, **{name: value for name, value in ours.items() if value}} or None
    engine_id = str(RequestEpoch(work.request_id, work.epoch))
    return EngineCoreRequest(
        request_id=engine_id,
        external_req_id=engine_id,
        prompt_token_ids=prompt,
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=work.arrival_time,
        lora_request=adapters.request(work.adapter),
        cache_salt=work.cache_salt,
        data_parallel_rank=None,
        priority=work.priority,
        reasoning_ended=work.reasoning_ended,
        reasoning_parser_kwargs=_unpacked(work.reasoning_parser_kwargs),
        session_id=work.session_id,
        trace_headers=work.trace_headers,
        resumable=stays,
    )


def _unpacked(kwargs: bytes | None) -> dict[str, Any] | None:
    """Inverse of `_packed`. Raises RequestError."""
    if kwargs is None:
        return None
    try:
        return msgspec.msgpack.decode(kwargs, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"the reasoning parser's arguments cannot be read: {error}") from error


def _check_beside_adapters(params: SamplingParams) -> None:
    """Raises BadRequestError for what ends a vLLM engine that can have LoRA adapters: it takes the positions of a
    prompt for as many requests, and finds no adapter for them."""
    if params.prompt_logprobs is not None:
        raise BadRequestError("log-probabilities of the prompt are not supported where LoRA is enabled")


def can_grow(sampling: bytes) -> bool:
    """Whether a request with these parameters may go on from the cache of a warm one: to vLLM all of its tokens are a
    prompt then, and nothing is rebuilt."""
    return is_of_context(_sampling_decoder.decode(sampling))


def _continue(params: SamplingParams, accepted: Sequence[int], forgotten: Collection[str]) -> None:
    """Have the engine count from the beginning of the output. Raises RequestError for what it cannot rebuild."""
    lost = survival_of(params).without(forgotten)
    if lost.fidelity is Fidelity.NONE:
        raise RequestError(f"the state of {lost.because_of} cannot be rebuilt")
    if params.max_tokens is not None:
        params.max_tokens += len(accepted)
    if params.min_tokens > 0:
        params.min_tokens += len(accepted)


def delta_of(output: EngineCoreOutput, current: RequestEpoch, position: int) -> TokenDelta:
    """Convert one request's share of an engine step, stamped with request and epoch. `position` is that of its first
    new token."""
    finish = None if output.finish_reason is None else _FINISH_NAMES[output.finish_reason]
    cause, why = cause_of(output.trace_headers)
    prompt_logprobs = output.new_prompt_logprobs_tensors
    return TokenDelta(
        request_id=current.request_id,
        epoch=current.epoch,
        position=position,
        token_ids=output.new_token_ids,
        finish=finish,
        stop_reason=output.stop_reason,
        error=why if finish == "error" else None,
        failed=finish == "error" and cause is None,
        fault="request" if finish == "error" and cause == "request" else None,
        logprobs=None if output.new_logprobs is None else pack_logprobs(*output.new_logprobs[:3]),
        prompt_logprobs=None if prompt_logprobs is None else pack_logprobs(*map(_numpy, prompt_logprobs[:3])),
        cached_tokens=None if output.prefill_stats is None else output.prefill_stats.num_cached_tokens,
        created_tokens=0 if output.prefill_stats is None else output.prefill_stats.num_cache_creation_tokens,
        events=tuple((int(event.type), event.timestamp) for event in output.events or ()),
    )


def core_output_of(
    delta: TokenDelta, prompt_tokens: int, trace_headers: Mapping[str, str] | None = None
) -> EngineCoreOutput:
    """An accepted delta as vLLM's output processor takes it. `trace_headers` are those of its request."""
    events = [EngineCoreEvent(EngineCoreEventType(kind), timestamp) for kind, timestamp in delta.events]
    return EngineCoreOutput(
        request_id=delta.request_id,
        new_token_ids=delta.token_ids,
        new_logprobs=None if delta.logprobs is None else LogprobsLists(*_arrays(delta.logprobs)),
        new_prompt_logprobs_tensors=_tensors(delta.prompt_logprobs),
        finish_reason=None if delta.finish is None else _FINISH[delta.finish],
        stop_reason=delta.stop_reason,
        events=events or None,
        trace_headers=trace_headers,
        prefill_stats=_prefill_stats(delta, prompt_tokens),
    )


def load_of(stats: SchedulerStats | None, *, keeps: bool = False, warm: int = 0) -> Load | None:
    """Convert the scheduler's load, if the step came with one. `keeps`: its engine keeps blocks for readers;
    `warm`: so many requests wait for more input, which vLLM counts as waiting."""
    if stats is None:
        return None
    running, waiting = stats.num_running_reqs, max(stats.num_waiting_reqs - warm, 0)
    if not stats.kv_connector_stats:
        return Load(running, waiting, float(stats.kv_cache_usage), 0.0 if keeps else None)
    counts = msgspec.convert(stats.kv_connector_stats, PullCounts)
    used = counts.used_blocks - counts.kept_blocks
    return Load(running, waiting, used / counts.blocks, counts.kept_blocks / counts.blocks)


def _prefill_stats(delta: TokenDelta, prompt_tokens: int) -> PrefillStats | None:
    if delta.cached_tokens is None:
        return None
    stats = PrefillStats()
    stats.set(prompt_tokens, min(delta.cached_tokens, prompt_tokens), 0)
    stats.num_cache_creation_tokens = delta.created_tokens
    return stats


def pack_logprobs(
    token_ids: NDArray[np.generic], logprobs: NDArray[np.generic], ranks: NDArray[np.generic]
) -> Logprobs:
    """vLLM's arrays as the message has them: shapes (n, k+1), (n, k+1), (n,)."""
    return Logprobs(_pack(token_ids, "int64"), _pack(logprobs, "float32"), _pack(ranks, "int64"))


def _pack(array: NDArray[np.generic], dtype: str) -> Array:
    exact = np.ascontiguousarray(array, dtype=dtype)
    return Array(dtype=dtype, shape=exact.shape, data=exact.tobytes())  # type: ignore[arg-type]


def _unpack(array: Array) -> NDArray[np.generic]:
    return np.frombuffer(array.data, dtype=array.dtype).reshape(array.shape)


def _arrays(logprobs: Logprobs) -> tuple[NDArray[np.generic], NDArray[np.generic], NDArray[np.generic]]:
    return _unpack(logprobs.token_ids), _unpack(logprobs.logprobs), _unpack(logprobs.ranks)


def _tensors(logprobs: Logprobs | None) -> LogprobsTensors | None:
    if logprobs is None:
        return None
    # Copied: torch wants arrays that it may write to, the message's bytes are not.
    token_ids, values, ranks = (torch.from_numpy(array.copy()) for array in _arrays(logprobs))
    return LogprobsTensors(token_ids, values, ranks)


def _numpy(tensor: torch.Tensor) -> NDArray[np.generic]:
    array: NDArray[np.generic] = tensor.cpu().numpy()
    return array
