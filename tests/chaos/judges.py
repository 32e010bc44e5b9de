"""What clients of the OpenAI API ask on real vLLM, and which answers are right.

On the quick start's model in float32 an answer is right if it is what came before anything went wrong. On a real model
in bfloat16 that is not so (tests/real_model/oracle.py): there each token is to be the greedy one, given its prefix.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx

from tests.chaos.answers import Outcome
from tests.real_model.oracle import judge

PROMPTS = 16
_LONGEST_ANSWER = 400
_ASKED_AGAIN = 10
"""So often at most the oracle is asked about an answer: it is asked while faults go on."""
_AGAIN_S = 1.0

GREEDY: Mapping[str, Any] = {"temperature": 0}
SAMPLINGS: tuple[Mapping[str, Any], ...] = (
    GREEDY,
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0, "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"temperature": 0.9, "seed": 8, "top_p": 0.9, "top_k": 40, "logprobs": 1},
    {"temperature": 0, "structured_outputs": {"regex": "([a-z]+ )+"}},
)
"""What is asked for in turn: all of it is exact (docs/internals/fidelity.md)."""


@dataclass(frozen=True, eq=False)
class Question:
    """A request of a client."""

    prompt: str
    max_tokens: int
    sampling: Mapping[str, Any]


@dataclass
class Got:
    """What a request has brought so far. Times are CLOCK_MONOTONIC."""

    tokens: list[int] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    asked_at: float = field(default_factory=time.monotonic)
    news_at: float = field(default_factory=time.monotonic)
    longest_silence_s: float = 0.0


Ask = Callable[[Question], Awaitable[Got]]


class Judge(Protocol):
    """Knows the questions, and judges their answers."""

    @property
    def model(self) -> str:
        """The model's name in a request."""
        ...

    async def learn(self, ask: Ask) -> list[Question]:
        """Return the questions that are to be asked. Before anything goes wrong."""
        ...

    async def judge(self, question: Question, got: Got, left: bool) -> tuple[Outcome, str]:
        """Judge an answer that has ended, or that its client has `left`. Returns the reason too, if it is not right."""
        ...


class SameTokens:
    """Right is what came before anything went wrong."""

    model = "quickstart"

    def __init__(self, seed: int) -> None:
        self._questions = _questions(seed, SAMPLINGS)
        self._answers: dict[Question, list[int]] = {}

    async def learn(self, ask: Ask) -> list[Question]:
        """Ask everything twice, in different company. Those questions are returned that have one answer: the margin
        between the first and the second choice of a token is no wider than the arithmetic is exact for the others."""
        first = [await ask(question) for question in self._questions]
        second = await asyncio.gather(*(ask(question) for question in self._questions))
        pairs = zip(self._questions, first, second, strict=True)
        self._answers = {question: once.tokens for question, once, again in pairs if once.tokens == again.tokens}
        return list(self._answers)

    async def judge(self, question: Question, got: Got, left: bool) -> tuple[Outcome, str]:
        wanted = self._answers[question]
        if got.tokens != wanted[: len(got.tokens)]:
            at = next(index for index, token in enumerate(got.tokens) if wanted[index : index + 1] != [token])
            return Outcome.WRONG, f"from position {at} on: {got.tokens[at : at + 5]}, not {wanted[at : at + 5]}"
        return _whole(got, len(wanted), left)


class GreedyTokens:
    """Right is each token that is the greedy one given its prefix. The server itself is asked, by one prefill."""

    model = "smollm2"

    def __init__(self, seed: int, http: httpx.AsyncClient) -> None:
        self._questions = _questions(seed, (GREEDY,))
        self._http = http

    async def learn(self, ask: Ask) -> list[Question]:
        return self._questions

    async def judge(self, question: Question, got: Got, left: bool) -> tuple[Outcome, str]:
        if got.tokens:
            logprobs = await self._prefill(got.prompt_tokens + got.tokens)
            wrong = judge(logprobs, got.tokens).wrong
            if wrong:
                return Outcome.WRONG, f"not the greedy tokens at {wrong[:5]}"
        return _whole(got, question.max_tokens, left)

    async def _prefill(self, tokens: list[int]) -> list[Any]:
        """The prompt's log-probabilities. Raises RuntimeError if they cannot be had."""
        body = {"model": self.model, "prompt": tokens, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}
        why = ""
        for _ in range(_ASKED_AGAIN):
            try:
                answer = await self._http.post("/v1/completions", json=body)
            except httpx.TransportError as error:
                why = repr(error)
            else:
                if answer.status_code == httpx.codes.OK:
                    found: list[Any] = answer.json()["choices"][0]["prompt_logprobs"]
                    return found
                why = answer.text[:300]
            await asyncio.sleep(_AGAIN_S)
        raise RuntimeError(f"the oracle has no answer: {why}")


def _questions(seed: int, samplings: tuple[Mapping[str, Any], ...]) -> list[Question]:
    rng = random.Random(f"{seed} questions")
    return [
        Question(
            f"question {number}: " + "word " * rng.randint(0, 60),
            rng.randint(20, _LONGEST_ANSWER),
            samplings[number % len(samplings)],
        )
        for number in range(PROMPTS)
    ]


def _whole(got: Got, tokens: int, left: bool) -> tuple[Outcome, str]:
    """Judge the length of an answer whose tokens are right."""
    if got.finish is None and left:
        return Outcome.LEFT, ""
    if len(got.tokens) < tokens:
        return Outcome.WRONG, f"{got.finish} after {len(got.tokens)} of {tokens} tokens"
    return Outcome.RIGHT, ""
