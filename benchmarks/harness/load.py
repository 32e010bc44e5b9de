"""A closed loop of streams: each asks again as soon as it has its answer."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.harness.accounting import Usage, usage
from benchmarks.harness.client import Answer, Connection
from benchmarks.harness.servers import Server

_WORDS = ("river", "stone", "cloud", "paper", "lamp", "winter", "garden", "silver", "horse", "letter", "bridge")


@dataclass(frozen=True)
class Shape:
    """What each request asks for. Lengths differ, so that the streams do not march in step."""

    prompt_words: int = 16
    min_tokens: int = 16
    max_tokens: int = 48


@dataclass(frozen=True)
class Load:
    """What one turn brought. Rates and gaps count from `begin` to `end`, CPU for the whole turn."""

    answers: tuple[Answer, ...]
    begin: float
    end: float
    used: Usage

    @property
    def failures(self) -> list[str]:
        return [answer.error for answer in self.answers if answer.error]

    @property
    def tokens(self) -> int:
        """All tokens of the turn."""
        return sum(answer.tokens for answer in self.answers)

    @property
    def events(self) -> int:
        """All events that brought tokens."""
        return sum(len(answer.times) for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        return sum(a.tokens_between(self.begin, self.end) for a in self.answers) / (self.end - self.begin)

    @property
    def requests_per_s(self) -> float:
        ended = sum(self.begin <= answer.ended_at < self.end for answer in self.answers if not answer.error)
        return ended / (self.end - self.begin)

    @property
    def ttfts_s(self) -> list[float]:
        """Of the requests sent once the streams were under way; their common start is a burst of its own."""
        return [a.ttft_s for a in self.answers if a.times and a.sent_at >= self.begin]

    @property
    def steps_s(self) -> list[float]:
        """Mean time between two tokens, of each answer. (Events may arrive in bursts: gaps say less.)"""
        return [
            (answer.times[-1] - answer.times[0]) / (answer.tokens - 1)
            for answer in self.answers
            if answer.tokens > 1 and answer.times and answer.times[0] >= self.begin and not answer.error
        ]

    @property
    def tokens_took_s(self) -> list[float]:
        """Time for each token of an answer, from the request to its last token. Never 0, however bursty the server."""
        return [(a.times[-1] - a.sent_at) / a.tokens for a in self.answers if a.times and not a.error]

    @property
    def gaps_s(self) -> list[float]:
        """Between two events of an answer."""
        return [
            later - earlier
            for answer in self.answers
            for earlier, later in zip(answer.times, answer.times[1:], strict=False)
            if self.begin <= later < self.end
        ]


RAMP_SHARE = 0.15
"""Share of a turn that is left out at its start."""


async def closed_loop(server: Server, *, streams: int, seconds: float, seed: int, shape: Shape) -> Load:
    """Keep `streams` requests under way for `seconds`, then let the last ones end.

    The same seed asks the same of any server.
    """
    before = usage(server.processes)
    start = time.perf_counter()
    end = start + seconds
    loops = [_one_stream(server, random.Random(f"{seed}/{index}"), end, shape) for index in range(streams)]
    answers = [answer for each in await asyncio.gather(*loops) for answer in each]
    used = usage(server.processes).since(before)
    return Load(tuple(answers), start + RAMP_SHARE * seconds, end, used)


async def _one_stream(server: Server, draw: random.Random, end: float, shape: Shape) -> list[Answer]:
    answers: list[Answer] = []
    async with Connection(server.host, server.port, server.model) as connection:
        while time.perf_counter() < end:
            length = draw.randint(shape.min_tokens, shape.max_tokens)
            answers.append(await connection.complete(prompt(draw, shape.prompt_words), length))
    return answers


def prompt(draw: random.Random, words: int) -> str:
    """Text that no other draw gives, so that no server has it in its prefix cache."""
    return " ".join((f"{draw.getrandbits(32):08x}", *draw.choices(_WORDS, k=words)))


def pooled_gaps(loads: Iterable[Load]) -> list[float]:
    return [gap for load in loads for gap in load.gaps_s]
