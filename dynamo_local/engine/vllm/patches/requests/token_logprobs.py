"""Log-probabilities of tokens that a request names (`logprob_token_ids`), beside other requests of the same batch.

As soon as one request of a step names tokens, vLLM's sampler gathers named tokens alone: the others of that step that
asked for the most likely candidates would be told of the sampled token and of nothing else. Here each row has what its
own request asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache, wraps
from typing import Any

import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.sampler import Sampler

from dynamo_local.engine.vllm.patches.check import applies

_MOST = "_dynamo_most_candidates"


@cache
def separate_logprobs() -> None:
    """Patch the samplers of this process, and so of those forked from it. A second call changes nothing."""
    if not applies("candidates beside named tokens"):
        return
    sampler: Any = Sampler
    sampler.forward = _noting_candidates(sampler.forward)
    sampler.gather_specific_token_logprobs = _with_candidates(sampler.gather_specific_token_logprobs)


def _noting_candidates(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def noting(sampler: Any, logits: torch.Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        setattr(sampler, _MOST, sampling_metadata.max_num_logprobs)
        return forward(sampler, logits, sampling_metadata, *args, **kwargs)

    return noting


def _with_candidates(gather: Callable[..., LogprobsTensors | None]) -> Callable[..., LogprobsTensors | None]:
    @wraps(gather)
    def gather_both(
        sampler: Any, logprobs: torch.Tensor, named: dict[int, list[int]], sampled: torch.Tensor
    ) -> LogprobsTensors | None:
        of_named = gather(sampler, logprobs, named, sampled)
        most = getattr(sampler, _MOST)
        if of_named is None or not most:
            return of_named
        return _merged(of_named, sampler.gather_logprobs(logprobs, most, token_ids=sampled), named)

    return gather_both


def _merged(of_named: LogprobsTensors, likeliest: LogprobsTensors, rows: Collection[int]) -> LogprobsTensors:
    """Take these rows from `of_named`, all others from `likeliest`."""
    width = max(of_named.logprobs.shape[1], likeliest.logprobs.shape[1])
    is_named = torch.zeros(len(of_named.logprobs), 1, dtype=torch.bool)
    is_named[list(rows)] = True
    is_named = is_named.to(of_named.logprobs.device)

    def chosen(one: torch.Tensor, other: torch.Tensor, filling: float) -> torch.Tensor:
        return torch.where(is_named, _widened(one, width, filling), _widened(other, width, filling))

    return LogprobsTensors(
        chosen(of_named.logprob_token_ids, likeliest.logprob_token_ids, 0),
        chosen(of_named.logprobs, likeliest.logprobs, float("-inf")),
        of_named.selected_token_ranks,
    )


def _widened(rows: torch.Tensor, width: int, filling: float) -> torch.Tensor:
    return torch.nn.functional.pad(rows, (0, width - rows.shape[1]), value=filling)
