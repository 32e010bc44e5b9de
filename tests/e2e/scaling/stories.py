"""Clients that ask one greedy request after the other, each for an answer that it knows."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any

import openai

MODEL = "random"


def tell(client: openai.OpenAI, number: int, tokens: int) -> str:
    """A greedy answer, taken as it comes."""
    stream = client.completions.create(
        model=MODEL,
        prompt=f"story number {number}: ",
        max_tokens=tokens,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    return "".join(chunk.choices[0].text for chunk in stream)


@dataclass
class Stories:
    """`right` are the answers to expect, one for each of the clients, of so many tokens."""

    client: openai.OpenAI
    tokens: int
    right: list[str]
    answered: list[int] = field(init=False)
    _over: list[threading.Event] = field(init=False)

    def __post_init__(self) -> None:
        self.answered = [0] * len(self.right)
        self._over = [threading.Event() for _ in self.right]

    @classmethod
    def undisturbed(cls, pool: Executor, client: openai.OpenAI, clients: int, tokens: int) -> Stories:
        """Take the answers that come now for right."""
        return cls(client, tokens, list(pool.map(lambda number: tell(client, number, tokens), range(clients))))

    def begin(self, pool: Executor) -> list[Future[None]]:
        """All ask from now on until they are told to end, or get a wrong answer, or none."""
        return [pool.submit(self._ask_on_and_on, number) for number in range(len(self.right))]

    def end(self, left: int = 0) -> None:
        """So many go on, the others stop with the answer that they are getting."""
        for over in self._over[left:]:
            over.set()

    def goes_on(self) -> Callable[[Any], bool]:
        """A condition that holds once each client that has not been told to end has had two more answers."""
        before = list(self.answered)
        asking = [number for number, over in enumerate(self._over) if not over.is_set()]
        return lambda _: all(self.answered[number] >= before[number] + 2 for number in asking)

    def _ask_on_and_on(self, number: int) -> None:
        while not self._over[number].is_set():
            assert tell(self.client, number, self.tokens) == self.right[number]
            self.answered[number] += 1
