"""Requests on their way from vLLM's OpenAI server to its engine: as the bus carries them, both ways.

Nothing is pickled. What comes back: outputs.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
from vllm.exceptions import VLLMClientError
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.tasks import SupportedTask
from vllm.v1.engine import EngineCoreRequest

from dynamo_local.core.errors import BadRequestError, RequestError
from dynamo_local.core.messages.work import RequestEpoch, Submit
from dynamo_local.core.ports import Request, Sampling
from dynamo_local.core.request.fidelity import Fidelity, Survival
from dynamo_local.engine.vllm.kv.pull.messages import TRANSFER
from dynamo_local.engine.vllm.requests.fidelity import is_of_context, survival_of
from dynamo_local.engine.vllm.requests.lora import NO_ADAPTERS, Adapters

_sampling_decoder = msgspec.msgpack.Decoder(SamplingParams)
_sampling_encoder = msgspec.msgpack.Encoder()

ACCEPTED = "dynamo_local_accepted"
"""Extra argument: the tokens of earlier epochs (patches/requests.py)."""

KEY = "dynamo_local_key"
"""Extra argument: the API key that the request came with (fair_waiting.py)."""


def request_of(
    core_request: EngineCoreRequest, *, lora: bool = False, adapter_keys: Mapping[int, str] = MappingProxyType({})
) -> Request:
    """Convert a request of vLLM's OpenAI server to one of ours. `lora`: the engines can have LoRA adapters.
    `adapter_keys`: by vLLM's number, what workers know adapters by that they do not know by name. Raises
    BadRequestError for what cannot be carried."""
    ours = _request_of(core_request, lora=lora)
    given = core_request.lora_request
    if given is None:
        return ours
    return msgspec.structs.replace(ours, adapter=adapter_keys.get(given.lora_int_id, given.lora_name))


def _request_of(core_request: EngineCoreRequest, *, lora: bool) -> Request:
    params = core_request.sampling_params
    _check_prompt(core_request)
    if core_request.pooling_params is not None:
        return _request(core_request, pack_params(core_request.pooling_params), survival=Survival(), pools=True)
    if params is None:
        raise BadRequestError("the request asks neither for tokens nor for a pooled output")
    if params.prompt_logprob_token_ids is not None:
        raise BadRequestError("prompt_logprob_token_ids is not supported")
    if lora:
        _check_beside_adapters(params)
    # For log-probabilities of the prompt, vLLM computes it whole, whatever is cached.
    elsewhere = params.prompt_logprobs is None
    return _request(
        core_request,
        _sampling_at(params),
        survival=survival_of(params),
        max_tokens=params.max_tokens,
        prefill_elsewhere=elsewhere,
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


def _request(
    core_request: EngineCoreRequest,
    sampling: Sampling,
    *,
    survival: Survival,
    max_tokens: int | None = None,
    pools: bool = False,
    prefill_elsewhere: bool = False,
) -> Request:
    assert core_request.prompt_token_ids is not None
    return Request(
        request_id=core_request.request_id,
        prompt_token_ids=core_request.prompt_token_ids,
        sampling=sampling,
        arrival_time=core_request.arrival_time,
        priority=core_request.priority,
        cache_salt=core_request.cache_salt,
        reasoning_ended=core_request.reasoning_ended,
        reasoning_parser_kwargs=_packed(core_request.reasoning_parser_kwargs),
        session_id=core_request.session_id,
        trace_headers=core_request.trace_headers,
        survival=survival,
        max_tokens=max_tokens,
        pools=pools,
        prefill_elsewhere=prefill_elsewhere,
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
