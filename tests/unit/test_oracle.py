"""The oracle of greedy answers: right ones pass, and a lost, doubled or foreign token is noticed."""

from __future__ import annotations

import random

import pytest

from tests.real_model.oracle import NEARLY_NAT, judge

Entry = dict[str, dict[str, float]]


def greedy(prefix: list[int]) -> int:
    """A model of a hundred tokens."""
    return random.Random(str(prefix[-8:])).randrange(100)


def logprobs_of(tokens: list[int], rounding: float = 0.0) -> list[Entry | None]:
    """What one prefill of these tokens tells. The greedy token leads by 3 nats."""
    found: list[Entry | None] = [None]
    for at in range(1, len(tokens)):
        best, token = greedy(tokens[:at]), tokens[at]
        found.append({str(token): {"logprob": -3.1}, str(best): {"logprob": -0.1 - (rounding if token == best else 0)}})
    return found


def answer(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(greedy(tokens))
    return tokens[len(prompt) :]


PROMPT = [1, 2, 3]
RIGHT = answer(PROMPT, 60)
AT = next(at for at in range(20, 60) if len(set(RIGHT[at - 1 : at + 2])) == 3)
"""Where an answer is damaged: what stands there differs from what stands beside it."""


@pytest.mark.parametrize("rounding", [0.0, NEARLY_NAT / 2])
def test_a_right_answer_passes(rounding: float) -> None:
    verdict = judge(logprobs_of(PROMPT + RIGHT, rounding), RIGHT)
    assert len(verdict.gaps) == len(RIGHT)
    assert verdict.wrong == ()


@pytest.mark.parametrize(
    "damaged",
    [
        RIGHT[:AT] + RIGHT[AT + 1 :],
        RIGHT[:AT] + RIGHT[AT - 1 :],
        [*RIGHT[:AT], (RIGHT[AT] + 1) % 100, *RIGHT[AT + 1 :]],
    ],
    ids=["lost", "doubled", "foreign"],
)
def test_a_damaged_answer_is_noticed_where_it_is_damaged(damaged: list[int]) -> None:
    assert judge(logprobs_of(PROMPT + damaged), damaged).wrong[0] == AT


def test_a_prompt_without_anything_before_the_answer_is_refused() -> None:
    with pytest.raises(ValueError, match="60 positions for 60 tokens"):
        judge(logprobs_of(RIGHT), RIGHT)
