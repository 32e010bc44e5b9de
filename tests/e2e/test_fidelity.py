"""The table of docs/fidelity.md, row by row, on real vLLM.

A new epoch submits prompt and accepted tokens as a prompt. The same can be asked through the API, without killing
anybody: what then follows must be what would have followed (exact), or come from the same distribution.
"""

from __future__ import annotations

from typing import Any

import openai
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm import SamplingParams
from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

from dynamo_local.core.fidelity import Fidelity
from dynamo_local.engine.vllm.fidelity import WHEN_USED, survival_of

MODEL = "quickstart"
PROMPT = [72, 101, 108, 108, 111, 32, 116, 104, 101, 114, 101]
TOKENS, CUT = 48, 17

EXACT = [
    {},
    {"top_p": 0.5, "top_k": 20, "min_p": 0.01},
    {"repetition_penalty": 1.3},
    {"logit_bias": {"65": 4.0, "66": -4.0}},
    {"allowed_token_ids": list(range(64, 96))},
    {"min_tokens": 30},
    {"stop_token_ids": [10]},
    {"logprobs": 2},
]
LOST_WITH_TEXT = [{"presence_penalty": 1.9}, {"frequency_penalty": 1.9}]


def generate(client: openai.OpenAI, prompt: list[int], tokens: int, options: dict[str, Any]) -> Any:
    own = {key: value for key, value in options.items() if key not in ("logprobs", "logit_bias", "top_p")}
    known = {key: value for key, value in options.items() if key not in own}
    body = {"return_token_ids": True, "ignore_eos": True, **own}
    return client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=tokens, extra_body=body, **{"temperature": 0, **known}
    ).choices[0]


def whole_and_continued(client: openai.OpenAI, options: dict[str, Any]) -> tuple[list[int], list[int]]:
    """The tokens of an undisturbed answer, and of one that was cut and continued."""
    whole = generate(client, PROMPT, TOKENS, options).token_ids
    assert len(whole) > CUT
    rest = dict(options)
    if "min_tokens" in rest:
        rest["min_tokens"] = max(rest["min_tokens"] - CUT, 0)
    continued = generate(client, PROMPT + whole[:CUT], TOKENS - CUT, rest).token_ids
    return whole, whole[:CUT] + continued


@pytest.mark.parametrize("options", EXACT, ids=lambda options: ",".join(options) or "greedy")
def test_exact(client: openai.OpenAI, options: dict[str, Any]) -> None:
    whole, continued = whole_and_continued(client, options)
    assert continued == whole


def test_in_distribution(client: openai.OpenAI) -> None:
    options = {"temperature": 1.0, "logprobs": 5}
    whole = generate(client, PROMPT, TOKENS, options)
    continued = generate(client, PROMPT + whole.token_ids[:CUT], 1, options)
    expected, actual = whole.logprobs.top_logprobs[CUT], continued.logprobs.top_logprobs[0]
    shared = expected.keys() & actual.keys()
    # Five candidates and the chosen one, which may be another in the two answers.
    assert len(shared) >= 5
    assert all(actual[token] == pytest.approx(expected[token], abs=1e-3) for token in shared)


@pytest.mark.parametrize("options", LOST_WITH_TEXT, ids=lambda options: ",".join(options))
def test_what_is_called_lost_would_indeed_differ(client: openai.OpenAI, options: dict[str, Any]) -> None:
    whole, continued = whole_and_continued(client, options)
    assert continued != whole


def test_every_field_is_classified() -> None:
    assert set(WHEN_USED) == set(SamplingParams.__struct_fields__)


@pytest.mark.parametrize(
    ("params", "fidelity", "because_of"),
    [
        (SamplingParams(temperature=0), Fidelity.EXACT, None),
        (SamplingParams(temperature=0, seed=1), Fidelity.EXACT, None),
        (SamplingParams(temperature=0, stop=["x"], logprobs=3, prompt_logprobs=1), Fidelity.EXACT, None),
        (SamplingParams(temperature=0, logit_bias={1: 1.0}, min_tokens=3), Fidelity.EXACT, None),
        (SamplingParams(temperature=0, watermarking=False), Fidelity.EXACT, None),
        (SamplingParams(temperature=0.5, top_p=0.9, top_k=3), Fidelity.DISTRIBUTION, "temperature"),
        (SamplingParams(temperature=0.5, seed=1), Fidelity.NONE, "seed"),
        (SamplingParams(temperature=0, presence_penalty=0.1), Fidelity.NONE, "presence_penalty"),
        (SamplingParams(temperature=0, frequency_penalty=0.1), Fidelity.NONE, "frequency_penalty"),
        (SamplingParams(temperature=0, bad_words=["x"]), Fidelity.NONE, "bad_words"),
        (SamplingParams(temperature=0, extra_args={"a": 1}), Fidelity.NONE, "extra_args"),
        (
            SamplingParams(temperature=0, structured_outputs=StructuredOutputsParams(regex="a+")),
            Fidelity.NONE,
            "structured_outputs",
        ),
        (
            SamplingParams(
                temperature=0, repetition_detection=RepetitionDetectionParams(max_pattern_size=2, min_count=3)
            ),
            Fidelity.NONE,
            "repetition_detection",
        ),
        (SamplingParams(temperature=0, thinking_token_budget=5), Fidelity.NONE, "thinking_token_budget"),
    ],
)
def test_a_request_is_as_good_as_its_worst_parameter(
    params: SamplingParams, fidelity: Fidelity, because_of: str | None
) -> None:
    survival = survival_of(params)
    assert (survival.fidelity, survival.because_of) == (fidelity, because_of)
