"""What comes back of requests: an engine's outputs and load, as the bus carries them, and as vLLM's OpenAI server takes
them.

Numbers stay exact: arrays travel as their bytes. Nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput, FinishReason
from vllm.v1.metrics.stats import PrefillStats, SchedulerStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from dynamo_local.core.messages.presence import Load
from dynamo_local.core.messages.tokens import Array, Logprobs, TokenDelta
from dynamo_local.core.messages.tokens import FinishReason as Finish
from dynamo_local.core.messages.work import RequestEpoch
from dynamo_local.engine.vllm.kv.pull.messages import PullCounts
from dynamo_local.engine.vllm.requests.faults import cause_of

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


# vLLM's arrays as the messages of the bus have them, both ways. Numbers stay exact: arrays travel as their bytes.


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
