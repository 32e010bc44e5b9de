"""Clients that always want tokens: each asks again as soon as it has its answer, and knows what it is to get."""

from __future__ import annotations

import asyncio
import itertools
import random
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.harness.client import Completion, ServerError
from benchmarks.harness.load import client_of, prompt
from benchmarks.harness.servers import Server

TOKENS = 160
"""Of each answer."""
_PROMPT_WORDS = 12
_FEW = 4
"""Asked at a time, where all are asked at once as well."""
_AGAIN_S = 0.1
"""After a request that failed."""


@dataclass
class Asked:
    """A request that a client has asked, and what came of it so far."""

    prompt: str
    answer: Completion = field(default_factory=Completion)

    def wrong(self, right: Sequence[int]) -> bool:
        """Whether it got other tokens, or ended whole with fewer."""
        tokens = self.answer.token_ids
        return tokens != list(right if self.answer.is_completed else right[: len(tokens)])


@dataclass(frozen=True)
class Seen:
    """What the clients saw from a moment on: of the requests that were under way then, those that were lost; new ones
    that failed; answers with wrong tokens; the longest time in which a client got no token."""

    under_way: int
    lost: int
    refused: int
    wrong: int
    gap_s: float
    errors: tuple[str, ...]


async def give_up(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel the tasks of clients. Raises the failure of one that has failed before."""
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result


class Clients:
    """So many at one server. An answer that is asked for again has a cache salt of its own: nothing of it is cached."""

    def __init__(self, server: Server, answers: Mapping[str, Sequence[int]]) -> None:
        self._server = server
        self._answers = answers
        self._asked: list[list[Asked]] = []
        self._tasks: list[asyncio.Task[None]] = []

    def open(self, count: int) -> None:
        for number in range(count):
            self._asked.append([])
            self._tasks.append(asyncio.create_task(self._ask_on_and_on(number), name=f"client {number}"))

    async def close(self) -> None:
        """What is under way is given up."""
        await give_up(self._tasks)

    def seen(self, begin: float) -> Seen:
        """From then until now. Times are those of `time.monotonic`."""
        now = time.monotonic()
        requests = [each for of_one in self._asked for each in of_one if not _before(each.answer.ended_s, begin)]
        under_way = [each for each in requests if _before(each.answer.sent_s, begin)]
        failed = [each for each in requests if each.answer.failure]
        return Seen(
            under_way=len(under_way),
            lost=sum(each in under_way for each in failed),
            refused=sum(each not in under_way for each in failed),
            wrong=sum(each.wrong(self._answers[each.prompt]) for each in requests),
            gap_s=max(
                longest_gap_s([at for each in of_one for at in each.answer.chunks_s], begin, now)
                for of_one in self._asked
            ),
            errors=tuple(sorted({each.answer.failure for each in failed})),
        )

    async def _ask_on_and_on(self, number: int) -> None:
        draw = random.Random(number)
        prompts = list(self._answers)
        while True:
            asked = Asked(draw.choice(prompts))
            self._asked[number].append(asked)
            await ask(self._server, asked)
            if asked.answer.failure:
                await asyncio.sleep(_AGAIN_S)


def _before(at: float | None, begin: float) -> bool:
    return at is not None and at < begin


def longest_gap_s(times: Sequence[float], begin: float, end: float) -> float:
    """The longest time without a token that ended after `begin`; the last one lasts until `end`. Without a token at
    all, everything."""
    before = [at for at in times if at < begin][-1:] or [begin]
    edges = [*before, *(at for at in times if begin <= at < end), end]
    return max(later - earlier for earlier, later in itertools.pairwise(edges))


async def ask(server: Server, asked: Asked) -> None:
    """Ask one request on a connection of its own."""
    async with client_of(server, return_token_ids=True, cache_salt=secrets.token_hex(8)) as client:
        await client.complete(asked.prompt, TOKENS, asked.answer)


async def learn_answers(server: Server, count: int) -> dict[str, list[int]]:
    """The answers of so many prompts at most: those that are the same in other company, for the margin between the
    first and the second choice of a token may be narrower than the arithmetic is exact for the others. Raises
    ServerError."""
    draw = random.Random(0)
    prompts = [prompt(draw, _PROMPT_WORDS) for _ in range(count)]
    together = [Asked(each) for each in prompts]
    await asyncio.gather(*(ask(server, each) for each in together))
    few: list[Asked] = []
    for at in range(0, count, _FEW):
        few += (asked := [Asked(each) for each in prompts[at : at + _FEW]])
        await asyncio.gather(*(ask(server, each) for each in asked))
    errors = {each.answer.failure for each in (*together, *few)} - {""}
    if errors:
        raise ServerError(f"the answers without a fault cannot be had: {', '.join(errors)}")
    return {
        many.prompt: many.answer.token_ids
        for many, alone in zip(together, few, strict=True)
        if many.answer.token_ids == alone.answer.token_ids
    }
