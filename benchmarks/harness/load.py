"""The load on a server: streams in a closed loop, each of which asks again when it is answered."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.accounting import Usage, usage
from benchmarks.harness.client import Client, Completion
from benchmarks.harness.servers import Server

LETTERS = range(32, 127)
"""Tokens of the tokenizer of `random` that are printable text: half a character would wait for its other half."""
_WORDS = ("river", "stone", "cloud", "paper", "lamp", "winter", "garden", "silver", "horse", "letter", "bridge")


@dataclass(frozen=True)
class Shape:
    """What each request asks for. Lengths differ, so that the streams do not march in step."""

    prompt_words: int = 16
    min_tokens: int = 16
    max_tokens: int = 48


@dataclass(frozen=True)
class Load:
    """What one turn brought. Rates and gaps count from `begin` to `end` (`time.monotonic`), CPU for the whole turn."""

    records: tuple[Completion, ...]
    begin: float
    end: float
    used: Usage

    @property
    def failures(self) -> list[str]:
        return [record.failure for record in self.records if record.failure]

    @property
    def tokens(self) -> int:
        """All tokens of the turn."""
        return sum(record.tokens for record in self.records)

    @property
    def events(self) -> int:
        """All events that brought tokens."""
        return sum(len(record.chunks_s) for record in self.records)

    @property
    def tokens_per_s(self) -> float:
        return sum(self._tokens_within(record) for record in self.records) / (self.end - self.begin)

    @property
    def requests_per_s(self) -> float:
        ended = [record.ended_s for record in self.records if record.is_completed]
        return sum(self.begin <= at < self.end for at in ended if at is not None) / (self.end - self.begin)

    @property
    def ttfts_s(self) -> list[float]:
        """Of the requests sent once the streams were under way; their common start is a burst of its own."""
        late = [record for record in self.records if record.sent_s is not None and record.sent_s >= self.begin]
        return [record.ttft_s for record in late if record.ttft_s is not None]

    @property
    def steps_s(self) -> list[float]:
        """Mean time between two tokens, of each answer. (Events may arrive in bursts: gaps say less.)"""
        late = [record for record in self.records if record.chunks_s and record.chunks_s[0] >= self.begin]
        return [record.itl_s for record in late if record.itl_s is not None and not record.failure]

    @property
    def tokens_took_s(self) -> list[float]:
        """Time for each token of an answer, from the request to its last token. Never 0, however bursty the server."""
        return [
            (record.chunks_s[-1] - record.sent_s) / record.tokens
            for record in self.records
            if record.chunks_s and record.sent_s is not None and not record.failure
        ]

    @property
    def gaps_s(self) -> list[float]:
        """Between two events of an answer."""
        return [
            later - earlier
            for record in self.records
            for earlier, later in itertools.pairwise(record.chunks_s)
            if self.begin <= later < self.end
        ]

    def _tokens_within(self, record: Completion) -> float:
        """A server may put several tokens into one event: taken to be spread evenly."""
        if not record.chunks_s:
            return 0.0
        return record.tokens * sum(self.begin <= at < self.end for at in record.chunks_s) / len(record.chunks_s)


RAMP_SHARE = 0.15
"""Share of a turn that is left out at its start."""
_AGAIN_S = 0.1
"""After a request that failed: a server that refuses at once is not to be stormed."""


def client_of(server: Server, model: str | None = None, **fields: Any) -> Client:
    """A client of the server's model, or of a named one, with connections of its own. `fields`: more of each
    request."""
    return Client(server.port, model or server.model, **fields)


async def closed_loop(server: Server, *, streams: int, seconds: float, seed: int, shape: Shape) -> Load:
    """Keep `streams` requests under way for `seconds`, then let the last ones end.

    The same seed asks the same of any server.
    """
    records: list[Completion] = []
    numbers = itertools.count()
    before, begun = usage(server.processes), time.monotonic()
    async with client_of(server) as client, asyncio.TaskGroup() as group:
        for _ in range(streams):
            group.create_task(_stream(client, _requests(numbers, seed, shape), begun + seconds, records))
    used = usage(server.processes).since(before)
    return Load(tuple(records), begun + RAMP_SHARE * seconds, begun + seconds, used)


async def _stream(client: Client, requests: Iterator[tuple[str, int]], until: float, records: list[Completion]) -> None:
    while time.monotonic() < until:
        records.append(completion := Completion())
        await client.complete(*next(requests), completion)
        if completion.failure:
            await asyncio.sleep(_AGAIN_S)


def _requests(numbers: Iterator[int], seed: int, shape: Shape) -> Iterator[tuple[str, int]]:
    """Prompts of words, so that servers have to make tokens of them, and numbers of tokens to answer."""
    for number in numbers:
        draw = random.Random(f"{seed}/{number}")
        yield prompt(draw, shape.prompt_words), draw.randint(shape.min_tokens, shape.max_tokens)


def prompt(draw: random.Random, words: int) -> str:
    """Text that no other draw gives, so that no server has it in its prefix cache."""
    return " ".join((f"{draw.getrandbits(32):08x}", *draw.choices(_WORDS, k=words)))


def pooled_gaps(loads: Iterable[Load]) -> list[float]:
    return [gap for load in loads for gap in load.gaps_s]
