"""Clients of the OpenAI API that judge their answers (judges.py)."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import httpx
import msgspec

from tests.chaos.answers import Outcome, engines_died
from tests.chaos.faults import DEADLY, Done
from tests.chaos.gaps import GapWatch
from tests.chaos.judges import Got, GreedyTokens, Judge, Question, SameTokens
from tests.chaos.results import Results


class HttpClients:
    """Sends streaming requests over HTTP, and judges every token."""

    def __init__(self, url: str, seed: int, stall_s: float, gap_slack_s: float, *, real_model: bool = False) -> None:
        self.results = Results()
        self._gaps = GapWatch(gap_slack_s)
        self._deaths: list[float] = []
        """Times of faults that killed an engine."""
        self._http = httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(stall_s))
        self._judge: Judge = GreedyTokens(seed, self._http) if real_model else SameTokens(seed)
        self._seed = seed
        self._stall_s = stall_s
        self._questions: list[Question] = []
        self._over = asyncio.Event()
        self._streams: list[asyncio.Task[None]] = []

    async def learn_answers(self) -> int:
        """Let the judge learn its questions before the first fault. Returns their number."""
        self._questions = await self._judge.learn(self._ask)
        return len(self._questions)

    def open_streams(self, count: int) -> None:
        """Start `count` clients that each send one request after the other."""
        for number in range(count):
            rng = random.Random(f"{self._seed} stream {number}")
            self._streams.append(asyncio.create_task(self._ask_on_and_on(rng)))

    async def close_streams(self, deadline_s: float) -> int:
        """Send no more requests, and wait for the answers. Returns the number of unanswered requests."""
        self._over.set()
        done, pending = await asyncio.wait(self._streams, timeout=deadline_s)
        for stream in done:
            stream.result()
        for stream in pending:
            stream.cancel()
        return len(pending)

    async def counted(self) -> Results:
        """Return the results of the requests, with the frontend's counts of remote prefills and migrations."""
        metrics = (await self._http.get("/metrics")).text
        prefills, migrations = (
            _counters(metrics, "dynamo_prefills_total"),
            _counters(metrics, "dynamo_migrations_total"),
        )
        return msgspec.structs.replace(
            self.results, prefills=dict(prefills), migrations=dict(migrations), gaps=self._gaps.gaps
        )

    async def close(self) -> None:
        await self._http.aclose()

    def record_fault(self, fault: Done) -> None:
        """Record a fault that was done just now. It allows longer gaps of all streams, as places are unknown."""
        now = time.monotonic()
        self._gaps.record_fault(fault.what, now, fault.seconds, None)
        if fault.what in DEADLY:
            self._deaths.append(now)

    async def _ask_on_and_on(self, rng: random.Random) -> None:
        while not self._over.is_set():
            leaves_after = rng.randint(1, 50) if rng.random() < 0.1 else None
            # With a unique salt, no worker has a prefix of the prompt cached.
            salt = rng.randbytes(8).hex() if rng.random() < 0.7 else ""
            await self._ask_and_judge(rng.choice(self._questions), leaves_after, salt)

    async def _ask_and_judge(self, question: Question, leaves_after: int | None, salt: str) -> None:
        got = Got()
        try:
            await self._read(question, got, leaves_after, salt)
            outcome, reason = await self._judge.judge(question, got, leaves_after is not None)
        except httpx.ReadTimeout:
            got.longest_silence_s = self._stall_s
            outcome, reason = Outcome.FORGOTTEN, f"nothing for {self._stall_s:g} s"
        except (httpx.HTTPError, RuntimeError) as error:
            outcome, reason = await self._judge_error(question, got, f"{type(error).__name__} {error}")
        what = f"{question.prompt[:14]!r}, {question.sampling}, {len(got.tokens)} of {question.max_tokens} tokens"
        self.results.add(outcome, len(got.tokens), got.longest_silence_s, reason, what)

    async def _judge_error(self, question: Question, got: Got, reason: str) -> tuple[Outcome, str]:
        died = engines_died(reason)
        explained = died is not None and died <= sum(at >= got.asked_at for at in self._deaths)
        return Outcome.ENGINES_DIED if explained else Outcome.ERROR, reason

    async def _ask(self, question: Question) -> Got:
        got = Got()
        await self._read(question, got)
        return got

    async def _read(self, question: Question, got: Got, leaves_after: int | None = None, salt: str = "") -> None:
        body = {
            "model": self._judge.model,
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
                    got.prompt_tokens = choice.get("prompt_token_ids") or got.prompt_tokens
                    got.tokens += choice.get("token_ids") or []
                    got.finish = choice.get("finish_reason") or got.finish
                if leaves_after is not None and len(got.tokens) >= leaves_after:
                    return


async def _events(response: httpx.Response) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the events of a stream. Raises RuntimeError with the server's error."""
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
    """Return the values of labels but the model, as words, and the count, of each series of this name above 0."""
    metrics = re.sub(r'\bmodel="[^"]*",?', "", metrics)
    lines = re.findall(rf"^{name}\{{(.*)\}} ([0-9.e+]+)$", metrics, re.MULTILINE)
    counted = ((" by ".join(re.findall(r'"(.*?)"', labels)), round(float(count))) for labels, count in lines)
    return [(labels, count) for labels, count in counted if count]
