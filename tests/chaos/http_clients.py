"""Clients of the OpenAI API that know what they are to get: what they got before anything went wrong."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from tests.chaos.answers import Outcome, engines_died
from tests.chaos.faults import DEADLY, Done
from tests.chaos.gaps import GapWatch
from tests.chaos.tally import Tally

MODEL = "quickstart"
PROMPTS = 16
_LONGEST_ANSWER = 400


SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0, "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"temperature": 0.9, "seed": 8, "top_p": 0.9, "top_k": 40, "logprobs": 1},
    {"temperature": 0, "structured_outputs": {"regex": "([a-z]+ )+"}},
)
"""What is asked for in turn: all of it is exact (docs/fidelity.md)."""


@dataclass(frozen=True, eq=False)
class Question:
    """A request with one right answer."""

    prompt: str
    max_tokens: int
    sampling: Mapping[str, Any]


@dataclass
class _Got:
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    asked_at: float = field(default_factory=time.monotonic)
    news_at: float = field(default_factory=time.monotonic)
    longest_silence_s: float = 0.0


class HttpClients:
    """Asks over HTTP, streaming, and compares token for token."""

    def __init__(self, url: str, seed: int, stall_s: float, gap_slack_s: float) -> None:
        self.tally = Tally()
        self._gaps = GapWatch(gap_slack_s)
        self._deaths: list[float] = []
        """When faults were done that are deadly for an engine."""
        self._http = httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(stall_s))
        self._seed = seed
        self._stall_s = stall_s
        rng = random.Random(f"{seed} questions")
        self._questions = [
            Question(
                f"question {number}: " + "word " * rng.randint(0, 60),
                rng.randint(20, _LONGEST_ANSWER),
                SAMPLINGS[number % len(SAMPLINGS)],
            )
            for number in range(PROMPTS)
        ]
        self._answers: dict[Question, list[int]] = {}
        self._over = asyncio.Event()
        self._streams: list[asyncio.Task[None]] = []

    async def learn_answers(self) -> int:
        """Ask everything twice, in different company. Returns how many questions have one answer: the margin between
        the first and the second choice of a token is no wider than the arithmetic is exact for the others."""
        first = [await self._ask(question) for question in self._questions]
        second = await asyncio.gather(*(self._ask(question) for question in self._questions))
        pairs = zip(self._questions, first, second, strict=True)
        self._answers = {question: once.tokens for question, once, again in pairs if once.tokens == again.tokens}
        return len(self._answers)

    def open_streams(self, count: int) -> None:
        """Have so many clients ask one request after the other."""
        for number in range(count):
            rng = random.Random(f"{self._seed} stream {number}")
            self._streams.append(asyncio.create_task(self._ask_on_and_on(rng)))

    async def close_streams(self, deadline_s: float) -> int:
        """Ask no more, and wait for the answers to come. Returns how many did not."""
        self._over.set()
        done, pending = await asyncio.wait(self._streams, timeout=deadline_s)
        for stream in done:
            stream.result()
        for stream in pending:
            stream.cancel()
        return len(pending)

    async def counted(self) -> Tally:
        """What became of the requests, and what the frontend counts of remote prefills and moves."""
        metrics = (await self._http.get("/metrics")).text
        prefills, moves = _counters(metrics, "dynamo_prefills_total"), _counters(metrics, "dynamo_moves_total")
        return msgspec.structs.replace(self.tally, prefills=dict(prefills), moves=dict(moves), gaps=self._gaps.gaps)

    async def close(self) -> None:
        await self._http.aclose()

    def strike(self, fault: Done) -> None:
        """A fault was done just now. Which streams were at its place is not known here: it accounts for gaps of all."""
        now = time.monotonic()
        self._gaps.strike(fault.what, now, fault.seconds, None)
        if fault.what in DEADLY:
            self._deaths.append(now)

    async def _ask_on_and_on(self, rng: random.Random) -> None:
        questions = list(self._answers)
        while not self._over.is_set():
            leaves_after = rng.randint(1, 50) if rng.random() < 0.1 else None
            # With a salt of its own, nobody has anything of the prompt cached.
            salt = rng.randbytes(8).hex() if rng.random() < 0.7 else ""
            await self._ask_and_judge(rng.choice(questions), leaves_after, salt)

    async def _ask_and_judge(self, question: Question, leaves_after: int | None, salt: str) -> None:
        got = _Got()
        try:
            await self._read(question, got, leaves_after, salt)
            outcome, reason = self._judge(question, got, leaves_after)
        except httpx.ReadTimeout:
            got.longest_silence_s = self._stall_s
            outcome, reason = Outcome.FORGOTTEN, f"nothing for {self._stall_s:g} s"
        except (httpx.HTTPError, RuntimeError) as error:
            outcome, reason = Outcome.ERROR, f"{type(error).__name__} {error}"
            died = engines_died(reason)
            if died is not None and died <= sum(at >= got.asked_at for at in self._deaths):
                outcome = Outcome.ENGINES_DIED
        what = f"{question.prompt[:14]!r}, {question.sampling}, {len(got.tokens)} of {question.max_tokens} tokens"
        self.tally.add(outcome, len(got.tokens), got.longest_silence_s, reason, what)

    def _judge(self, question: Question, got: _Got, leaves_after: int | None) -> tuple[Outcome, str]:
        wanted = self._answers[question]
        if got.tokens != wanted[: len(got.tokens)]:
            at = next(index for index, token in enumerate(got.tokens) if wanted[index : index + 1] != [token])
            return Outcome.WRONG, f"from position {at} on: {got.tokens[at : at + 5]}, not {wanted[at : at + 5]}"
        if got.finish is None and leaves_after is not None:
            return Outcome.LEFT, ""
        if len(got.tokens) < len(wanted):
            return Outcome.WRONG, f"{got.finish} after {len(got.tokens)} of {len(wanted)} tokens"
        return Outcome.RIGHT, ""

    async def _ask(self, question: Question) -> _Got:
        got = _Got()
        await self._read(question, got)
        return got

    async def _read(self, question: Question, got: _Got, leaves_after: int | None = None, salt: str = "") -> None:
        body = {
            "model": MODEL,
            "prompt": question.prompt,
            "max_tokens": question.max_tokens,
            **question.sampling,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        if salt:
            body["cache_salt"] = salt
        async with (
            self._http.stream("POST", "/v1/completions", json=body) as response,
            aclosing(_events(response)) as events,
        ):
            async for event in events:
                now = time.monotonic()
                got.longest_silence_s = max(got.longest_silence_s, now - got.news_at)
                self._gaps.ended(question.prompt[:14], None, got.news_at, now)
                got.news_at = now
                for choice in event.get("choices", ()):
                    got.tokens += choice.get("token_ids") or []
                    got.finish = choice.get("finish_reason") or got.finish
                if leaves_after is not None and len(got.tokens) >= leaves_after:
                    return


async def _events(response: httpx.Response) -> AsyncGenerator[dict[str, Any], None]:
    """The events of a stream. Raises RuntimeError with what the server says instead."""
    if response.status_code != httpx.codes.OK:
        raise RuntimeError(f"{response.status_code}: {(await response.aread()).decode(errors='replace')[:300]}")
    async for line in response.aiter_lines():
        data = line.removeprefix("data: ")
        if data == line or data == "[DONE]":
            continue
        event = json.loads(data)
        if "error" in event:
            raise RuntimeError(f"error in the stream: {event['error']}")
        yield event


def _counters(metrics: str, name: str) -> list[tuple[str, int]]:
    """The labels' values, as words, and the count, of each counter of this name that has counted."""
    lines = re.findall(rf"^{name}\{{(.*)\}} ([0-9.e+]+)$", metrics, re.MULTILINE)
    counted = ((" by ".join(re.findall(r'"(.*?)"', labels)), round(float(count))) for labels, count in lines)
    return [(labels, count) for labels, count in counted if count]
