"""Requests between vLLM's OpenAI server and its engine, as the bus carries them: there and back, tokens and pooled
outputs. Imports vLLM.

Nothing is pickled, and numbers stay exact: arrays travel as their bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from vllm.exceptions import VLLMClientError
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.tasks import SupportedTask
from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.metrics.stats import PrefillStats, SchedulerStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from dynamo_local.core.errors import BadRequestError, EngineError, RequestError
from dynamo_local.core.messages.presence import Load
from dynamo_local.core.messages.work import Array, Logprobs, RequestEpoch, Submit, TokenDelta
from dynamo_local.core.messages.work import FinishReason as Finish
from dynamo_local.core.ports import Request, Sampling
from dynamo_local.core.request.recovery import Fidelity, Survival
from dynamo_local.engine.vllm.kv.pull.messages import TRANSFER, PullCounts
from dynamo_local.engine.vllm.requests.continuing import ACCEPTED, is_of_context, survival_of
from dynamo_local.engine.vllm.requests.faults import cause_of
from dynamo_local.engine.vllm.requests.lora import NO_ADAPTERS, Adapters

# What a model can be asked for, told from its configuration.
#
# vLLM asks the loaded model. The frontend has none, and starts before its workers have. The tables follow the classes
# of vLLM 0.32 (`pooler` of each model in vllm/model_executor/models); the contract test compares them with its engines.

_EMBED: tuple[SupportedTask, ...] = ("embed", "token_embed")
_CLASSIFY: tuple[SupportedTask, ...] = ("classify", "token_classify")
_TOKEN_CLASSIFY: tuple[SupportedTask, ...] = ("token_classify",)
_TOKEN_EMBED: tuple[SupportedTask, ...] = ("token_embed",)

_OF_CLASS: dict[str, tuple[SupportedTask, ...]] = {
    "BgeM3EmbeddingModel": ("embed", "embed&token_classify", "token_classify", "token_embed"),
    "ForSequenceClassification": _CLASSIFY,
    "ForTokenClassification": _TOKEN_CLASSIFY,
    "RewardModel": _TOKEN_CLASSIFY,
}
"""By the end of the name of the model's class in vLLM."""

_OF_SCORES: dict[str, tuple[SupportedTask, ...]] = {
    "bi-encoder": _EMBED,
    "cross-encoder": _CLASSIFY,
    "late-interaction": _TOKEN_EMBED,
}
"""By the way in which vLLM computes scores with other models."""

_PLUGINS = ("Terratorch", "ClefOmniForJointSchema")
"""Classes whose outputs only a plugin of vLLM can read."""


def tasks_of(model_config: Any) -> tuple[SupportedTask, ...]:
    """Tell the tasks from vLLM's ModelConfig. Raises EngineError for a model that only plugins can serve."""
    if model_config.runner_type != "pooling":
        return ("generate",)
    info = model_config._model_info
    if not info.is_pooling_model:
        # vLLM makes a pooling model of one that generates.
        return _CLASSIFY if model_config.convert_type == "classify" else _EMBED
    if info.architecture in _PLUGINS:
        what = f"models like {info.architecture} need a plugin of vLLM, which is not supported"
        raise EngineError(what, "choose another model")
    named = (tasks for end, tasks in _OF_CLASS.items() if info.architecture.endswith(end))
    return next(named, None) or _OF_SCORES[info.score_type]


_sampling_decoder = msgspec.msgpack.Decoder(SamplingParams)
_sampling_encoder = msgspec.msgpack.Encoder()

KEY = "dynamo_local_key"
"""Extra argument: the API key that the request came with (fair_waiting.py)."""


def request_of(
    core_request: EngineCoreRequest, *, lora: bool = False, adapter_keys: Mapping[int, str] = MappingProxyType({})
) -> Request:
    """Convert a request of vLLM's OpenAI server to one of ours. `lora`: the engines can have LoRA adapters.
    `adapter_keys`: by vLLM's number, what workers know adapters by that they do not know by name. Raises
    BadRequestError for what cannot be carried."""
    _check_prompt(core_request)
    assert core_request.prompt_token_ids is not None
    pooling, given = core_request.pooling_params, core_request.lora_request
    params = core_request.sampling_params if pooling is None else None
    return Request(
        request_id=core_request.request_id,
        prompt_token_ids=core_request.prompt_token_ids,
        sampling=_sampling_of(params, lora=lora) if pooling is None else pack_params(pooling),
        arrival_time=core_request.arrival_time,
        priority=core_request.priority,
        cache_salt=core_request.cache_salt,
        reasoning_ended=core_request.reasoning_ended,
        reasoning_parser_kwargs=_packed(core_request.reasoning_parser_kwargs),
        session_id=core_request.session_id,
        trace_headers=core_request.trace_headers,
        survival=Survival() if params is None else survival_of(params),
        max_tokens=None if params is None else params.max_tokens,
        pools=pooling is not None,
        # For log-probabilities of the prompt, vLLM computes it whole, whatever is cached.
        prefill_elsewhere=params is not None and params.prompt_logprobs is None,
        adapter=None if given is None else adapter_keys.get(given.lora_int_id, given.lora_name),
    )


def _check_prompt(core_request: EngineCoreRequest) -> None:
    if core_request.prompt_token_ids is None or core_request.prompt_embeds is not None:
        raise BadRequestError("only prompts of tokens are supported")
    if core_request.mm_features:
        raise BadRequestError("multimodal prompts are not supported")
    if core_request.kv_hints is not None:
        raise BadRequestError("kv_hints is not supported")
    if core_request.resumable:
        raise BadRequestError("prompts that are sent in parts are not supported")


def _packed(kwargs: dict[str, Any] | None) -> bytes | None:
    """Encode a client's arguments of the chat template. Raises BadRequestError."""
    if kwargs is None:
        return None
    try:
        return msgspec.msgpack.encode(kwargs)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BadRequestError(f"chat_template_kwargs cannot be sent to an engine: {error}") from error


def _sampling_of(params: SamplingParams | None, *, lora: bool) -> Sampling:
    """Encode a client's parameters. Raises BadRequestError for what cannot be carried."""
    if params is None:
        raise BadRequestError("the request asks neither for tokens nor for a pooled output")
    if params.prompt_logprob_token_ids is not None:
        raise BadRequestError("prompt_logprob_token_ids is not supported")
    if lora:
        _check_beside_adapters(params)

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
    tasks: tuple[SupportedTask, ...] | None = None,
) -> EngineCoreRequest:
    """A submission as vLLM's engine core takes it, its id made of request and epoch. Raises RequestError.

    `transfer` tells the KV connector what to do with it, ACCEPTED the engine what earlier epochs have brought, and KEY
    whose it is; nothing else that the submission says may. `forgotten` are parameters whose state this engine cannot
    rebuild. `stays`: it waits for more input when it has finished. `tasks`: those of the engine, for pooling requests.
    """
    if work.pools:
        return _core_request(work, work.token_ids, adapters, pooling=read_params(work.sampling, tasks))
    if tasks is not None and "generate" not in tasks:
        raise RequestError(f"this worker's engine does not generate, but does {', '.join(tasks)}")
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
    ours: dict[str, Any] = {TRANSFER: transfer, ACCEPTED: accepted, KEY: work.key}
    theirs = {name: value for name, value in (params.extra_args or {}).items() if name not in ours}
    params.extra_args = {**theirs, **{name: value for name, value in ours.items() if value}} or None
    return _core_request(work, prompt, adapters, sampling=params, stays=stays)


def _core_request(
    work: Submit,
    prompt: list[int],
    adapters: Adapters,
    *,
    sampling: SamplingParams | None = None,
    pooling: PoolingParams | None = None,
    stays: bool = False,
) -> EngineCoreRequest:
    engine_id = str(RequestEpoch(work.request_id, work.epoch))
    return EngineCoreRequest(
        request_id=engine_id,
        external_req_id=engine_id,
        prompt_token_ids=prompt,
        mm_features=None,
        sampling_params=sampling,
        pooling_params=pooling,
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


# Requests to pooling models (embeddings, classes, scores), as they travel on the bus.
# The answer comes in one step and has no tokens: after a loss the request is computed again from its prompt.

_decoder = msgspec.msgpack.Decoder(PoolingParams)
_encoder = msgspec.msgpack.Encoder()


def pack_params(params: PoolingParams) -> Sampling:
    """Encode a client's parameters. Raises BadRequestError for what cannot be carried."""
    if params.late_interaction_params is not None:
        # The documents of a request would have to be computed by the engine that has kept its query.
        raise BadRequestError("scores of late interaction are computed in the frontend here, not in the engine")
    if params.extra_kwargs:
        raise BadRequestError("arguments of plugins are not supported")
    packed = _encoder.encode(params)

    def encode(position: int, at_most: int | None = None) -> bytes:
        return packed

    return encode


def read_params(packed: bytes, tasks: tuple[SupportedTask, ...] | None = None) -> PoolingParams:
    """Inverse of `pack_params`. `tasks` are those of the engine, which would end at any other. Raises RequestError."""
    try:
        params = _decoder.decode(packed)
    except VLLMClientError as error:
        raise BadRequestError(str(error)) from error
    except (msgspec.DecodeError, ValueError) as error:
        raise RequestError(f"the pooling parameters cannot be read: {error}") from error
    if tasks is not None and params.task not in tasks:
        raise RequestError(f"this worker's engine does not do {params.task!r}, but {', '.join(tasks)}")
    return params


# What comes back: an engine's outputs and load, as the bus carries them, and as vLLM's OpenAI server takes them.

_FINISH: dict[Finish, FinishReason] = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
    "error": FinishReason.ERROR,
    "repetition": FinishReason.REPETITION,
}
_FINISH_NAMES: dict[FinishReason, Finish] = {reason: name for name, reason in _FINISH.items()}


def delta_of(output: EngineCoreOutput, current: RequestEpoch, position: int, ended_at: float) -> TokenDelta:
    """Convert one request's share of an engine step, stamped with request and epoch. `position` is that of its first
    new token; `ended_at` is when the step ended (CLOCK_MONOTONIC, s)."""
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
        prompt_logprobs=None if prompt_logprobs is None else pack_logprobs(*map(as_array, prompt_logprobs[:3])),
        cached_tokens=None if output.prefill_stats is None else output.prefill_stats.num_cached_tokens,
        created_tokens=0 if output.prefill_stats is None else output.prefill_stats.num_cache_creation_tokens,
        events=tuple((int(event.type), ended_at - event.timestamp) for event in output.events or ()),
        pooled=None if output.pooling_output is None else pack_pooled(output.pooling_output),
    )


def core_output_of(
    delta: TokenDelta, arrived_at: float, prompt_tokens: int, trace_headers: Mapping[str, str] | None = None
) -> EngineCoreOutput:
    """An accepted delta as vLLM's output processor takes it. `arrived_at` is when it came (CLOCK_MONOTONIC, s), to vLLM
    the end of its step. `trace_headers` are those of its request."""
    events = [EngineCoreEvent(EngineCoreEventType(kind), arrived_at - age_s) for kind, age_s in delta.events]
    return EngineCoreOutput(
        request_id=delta.request_id,
        new_token_ids=delta.token_ids,
        new_logprobs=None if delta.logprobs is None else LogprobsLists(*unpack_logprobs(delta.logprobs)),
        new_prompt_logprobs_tensors=logprobs_tensors(delta.prompt_logprobs),
        finish_reason=None if delta.finish is None else _FINISH[delta.finish],
        stop_reason=delta.stop_reason,
        events=events or None,
        trace_headers=trace_headers,
        prefill_stats=_prefill_stats(delta, prompt_tokens),
        pooling_output=None if delta.pooled is None else unpack_pooled(delta.pooled),
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


# vLLM's arrays as the messages of the bus have them, both ways.


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


def unpack_logprobs(logprobs: Logprobs) -> tuple[NDArray[np.generic], NDArray[np.generic], NDArray[np.generic]]:
    """Inverse of `pack_logprobs`."""
    return _unpack(logprobs.token_ids), _unpack(logprobs.logprobs), _unpack(logprobs.ranks)


def logprobs_tensors(logprobs: Logprobs | None) -> LogprobsTensors | None:
    """Log-probabilities of a prompt as vLLM's output processor takes them."""
    if logprobs is None:
        return None
    # Copied: torch wants arrays that it may write to, the message's bytes are not.
    token_ids, values, ranks = (torch.from_numpy(array.copy()) for array in unpack_logprobs(logprobs))
    return LogprobsTensors(token_ids, values, ranks)


def as_array(tensor: torch.Tensor) -> NDArray[np.generic]:
    """A tensor's numbers, in the memory of the machine."""
    array: NDArray[np.generic] = tensor.cpu().numpy()
    return array


def pack_pooled(output: torch.Tensor) -> Array:
    """A pooled output as it travels: in float32, which has every number of the smaller data types."""
    return _pack(np.atleast_1d(as_array(output.to(torch.float32))), "float32")


def unpack_pooled(array: Array) -> torch.Tensor:
    """Inverse of `pack_pooled`."""
    # Copied, as above.
    return torch.from_numpy(_unpack(array).copy())
