"""Log-probabilities of named tokens in the pinned vLLM's sampler, beside requests that want the likeliest ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from torch._dynamo import config as compilation
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from dynamo_local.engine.vllm.patches.requests import separate_logprobs

VOCABULARY = 16
LOGITS = torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("forward", "gather_specific_token_logprobs"):
        monkeypatch.setattr(Sampler, name, getattr(Sampler, name))
    separate_logprobs.__wrapped__()
    # As in engines (patches/tuning.py): here, compiling would take longer than all else.
    with compilation.patch(disable=True):
        yield


def sampled(rows: list[int], most: int | None, named: dict[int, list[int]]) -> LogprobsTensors:
    """Sample these rows greedily, and return their log-probabilities. `named` is by place in `rows`."""
    empty = torch.empty(0)
    metadata = SamplingMetadata(
        temperature=None,
        all_greedy=True,
        all_random=False,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=most,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=empty,
        presence_penalties=empty,
        repetition_penalties=empty,
        output_token_ids=[[] for _ in rows],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
        logprob_token_ids=named or None,
    )
    told: LogprobsTensors | None = Sampler()(LOGITS[rows].clone(), metadata).logprobs_tensors
    assert told is not None
    return told


def row(told: LogprobsTensors, index: int, candidates: int) -> Any:
    """Read one request's, as its server does: the sampled token and so many candidates, and the rank of the former."""
    ids, values, ranks = (tensor[index].tolist() for tensor in told[:3])
    return ids[: candidates + 1], values[: candidates + 1], ranks


@pytest.mark.parametrize("likeliest", [0, 1, 5])
@pytest.mark.parametrize("names", [[3], [2, 9, 4]])
def test_each_request_is_told_what_it_asked_for(likeliest: int, names: list[int]) -> None:
    together = sampled([0, 1, 2, 3], likeliest, {1: names, 3: names[:1]})
    assert row(together, 0, likeliest) == row(sampled([0], likeliest, {}), 0, likeliest)
    assert row(together, 2, likeliest) == row(sampled([2], likeliest, {}), 0, likeliest)
    assert row(together, 1, len(names)) == row(sampled([1], None, {0: names}), 0, len(names))
    assert row(together, 3, 1) == row(sampled([3], None, {0: names[:1]}), 0, 1)
    assert row(together, 1, len(names))[0][1:] == names


def test_vllm_itself_does_not_tell_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else there is no need for token_logprobs.py any more."""
    monkeypatch.undo()
    together = sampled([0, 1], 5, {1: [3]})
    assert together.logprobs.shape[1] == 2
    assert together.logprobs[0, 1] == float("-inf")
