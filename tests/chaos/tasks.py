"""Random requests, each with its right answer."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from dynamo_local.core.messages.work import FinishReason
from dynamo_local.core.ports import Request
from dynamo_local.core.request.recovery import Fidelity, Survival
from dynamo_local.engine.mocker.tokens import continuation
from tests.chaos.settings import VOCAB_SIZE

LONGEST_PROMPT = 1500
_LOST = Survival(Fidelity.NONE, "seed")
_POPULAR = 5
_SHARED_PREFIX = [(7 * index) % VOCAB_SIZE for index in range(200)]


@dataclass(frozen=True)
class Task:
    """A request of a client. `leaves_after_s`: time after which the client disconnects if it still waits."""

    request_id: str
    prompt: Sequence[int]
    max_tokens: int
    min_tokens: int = 0
    stop_token: int | None = None
    logprobs: int | None = None
    survival: Survival = Survival()  # noqa: RUF009  # frozen
    leaves_after_s: float | None = None

    @property
    def valid(self) -> bool:
        return self.max_tokens > 0

    @property
    def survives(self) -> bool:
        return self.survival.fidelity is not Fidelity.NONE

    @cached_property
    def answer(self) -> list[int]:
        """The tokens of the right answer."""
        tokens = continuation(self.prompt, self.max_tokens, VOCAB_SIZE)
        for index, token in enumerate(tokens):
            if token == self.stop_token and index >= self.min_tokens:
                return tokens[: index + 1]
        return tokens

    @property
    def finish(self) -> FinishReason:
        stopped = self.answer[-1] == self.stop_token and len(self.answer) > self.min_tokens
        return "stop" if stopped else "length"

    def request(self) -> Request:
        return Request(
            self.request_id,
            self.prompt,
            self.sampling,
            arrival_time=time.time(),
            survival=self.survival,
            max_tokens=self.max_tokens,
        )

    def sampling(self, position: int, at_most: int | None = None) -> bytes:
        """Return vLLM's sampling parameters, encoded, for continuing at `position`."""
        limits = [self.max_tokens - position, *([] if at_most is None else [at_most])]
        fields: dict[str, Any] = {
            "max_tokens": min(limits),
            "min_tokens": min(max(self.min_tokens - position, 0), *limits),
            "ignore_eos": True,
        }
        if self.stop_token is not None:
            fields["stop_token_ids"] = [self.stop_token]
        if self.logprobs is not None:
            fields["logprobs"] = self.logprobs
        return msgspec.msgpack.encode(fields)


def draw_task(rng: random.Random, request_id: str) -> Task:
    """Draw a request: most are short, some are long, a few are invalid or cannot be recovered."""
    prompt_tokens = rng.randint(1, 200) if rng.random() < 0.9 else rng.randint(200, LONGEST_PROMPT)
    prompt = rng.choices(range(VOCAB_SIZE), k=prompt_tokens)
    if rng.random() < 0.2:
        prompt = [*_SHARED_PREFIX, *prompt]
    if rng.random() < 0.05:
        # A prompt that several clients send at the same time, like the choices of one request.
        popular = rng.randrange(_POPULAR)
        prompt = [(popular + index * index) % VOCAB_SIZE for index in range(250 * (popular + 1))]
    max_tokens = rng.randint(1, 150) if rng.random() < 0.7 else rng.randint(150, 600)
    odd = rng.random()
    return Task(
        request_id,
        prompt,
        max_tokens=0 if odd < 0.01 else max_tokens,
        min_tokens=rng.randint(0, max_tokens) if rng.random() < 0.2 else 0,
        stop_token=rng.randrange(VOCAB_SIZE) if rng.random() < 0.3 else None,
        logprobs=rng.randint(0, 3) if rng.random() < 0.1 else None,
        survival=_LOST if 0.01 <= odd < 0.06 else Survival(),
        leaves_after_s=rng.uniform(0, 3) if rng.random() < 0.1 else None,
    )
