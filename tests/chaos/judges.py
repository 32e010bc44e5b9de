"""Questions of clients of the OpenAI API on vLLM, and judges of their answers.

With the model `random` in float32, an answer is right if it is the same as before the first fault. A real model in
bfloat16 does not repeat its answers exactly (tests/real_model/oracle.py): there each token must be the greedy one,
given its prefix.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx

from tests.chaos.answers import Outcome
from tests.real_model.oracle import judge

PROMPTS = 16
_LONGEST_ANSWER = 400
_ASKED_AGAIN = 10
"""Maximum number of attempts to ask the oracle about an answer, since faults go on meanwhile."""
_AGAIN_S = 1.0

GREEDY: Mapping[str, Any] = {"temperature": 0}
SAMPLINGS: tuple[Mapping[str, Any], ...] = (
    GREEDY,
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0, "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"temperature": 0.9, "seed": 8, "top_p": 0.9, "top_k": 40, "logprobs": 1},
    {"temperature": 0, "structured_outputs": {"regex": "([a-z]+ )+"}},
)
"""Sampling parameters of the questions, in turn. Answers to all of them are exact (docs/internals/fidelity.md)."""


@dataclass(frozen=True, eq=False)
class Question:
    """A request that clients send."""

    prompt: str
    max_tokens: int
    sampling: Mapping[str, Any]


@dataclass
class Got:
    """The answer to a request so far. Times are CLOCK_MONOTONIC."""

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
        """The name of the model in requests."""
        ...

    async def learn(self, ask: Ask) -> list[Question]:
        """Return the questions to ask. Called before the first fault."""
        ...

    async def judge(self, question: Question, got: Got, left: bool) -> tuple[Outcome, str]:
        """Judge an answer that has ended, or that its client has `left`. Returns the outcome, and the reason of a
        failure."""
        ...


class SameTokens:
    """Judges answers by those before the first fault."""

    model = "random"

    def __init__(self, seed: int, samplings: Sequence[Mapping[str, Any]] = SAMPLINGS) -> None:
        self._questions = _questions(seed, samplings)
        self._answers: dict[Question, list[int]] = {}

    async def learn(self, ask: Ask) -> list[Question]:
        """Ask every question twice, alone and together with all others; return the questions with equal answers. In
        the other answers two tokens are so nearly equal that rounding decides between them."""
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
    """Judges each token by whether it is the greedy one given its prefix. Asks the server itself, by a prefill."""

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
        """Return the prompt's log-probabilities. Raises RuntimeError if the server does not answer."""
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


def _questions(seed: int, samplings: Sequence[Mapping[str, Any]]) -> list[Question]:
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
