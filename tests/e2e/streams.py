"""Requests to a pair of workers that lend each other KV (fixture `pair`), and what is done to them meanwhile."""

from __future__ import annotations

import random
import re
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai

from dynamo_local.control.client import ControlClient
from dynamo_local.control.operations import LIST_REQUESTS, MIGRATE
from tests.e2e.llm_server import PATIENCE_S, LlmServer

MODEL = "random"
SEED = 20261121
WORKERS = ("pair_VllmWorker", "pair_VllmWorker_1")
TAIL = 64
"""Tokens that still come when an answer is enough: two blocks."""


@dataclass
class Stream:
    """An answer that is taken as it comes, until it is over or the test has had enough of it."""

    client: openai.OpenAI
    prompt: list[int]
    tokens: int
    options: dict[str, Any]
    salt: str
    model: str = MODEL
    id: str = ""
    begun: threading.Event = field(default_factory=threading.Event)
    enough: threading.Event = field(default_factory=threading.Event)

    def read(self) -> dict[int, list[Any]]:
        """For each choice: its tokens, log-probabilities and how it ended."""
        known = {k: v for k, v in self.options.items() if k in ("logprobs", "logit_bias", "top_p", "stop", "n", "seed")}
        own = {k: v for k, v in self.options.items() if k not in known}
        extra = {"ignore_eos": True, "return_token_ids": True, "cache_salt": self.salt, **own}
        found: dict[int, list[Any]] = {}
        wanted: float | None = None
        with self.client.completions.create(
            model=self.model, prompt=self.prompt, max_tokens=self.tokens, stream=True, extra_body=extra, **known
        ) as answer:
            for chunk in answer:
                self.id = chunk.id
                for choice in chunk.choices:
                    self._take(found.setdefault(choice.index, [[], [], "", None]), choice)
                lengths = [len(choice[0]) for choice in found.values()] or [0]
                if min(lengths) > 8:
                    self.begun.set()
                if wanted is None and self.enough.is_set():
                    wanted = max(lengths) + TAIL
                if wanted is not None and min(lengths) >= wanted:
                    break
        return found

    def _take(self, found: list[Any], choice: Any) -> None:
        found[0] += choice.token_ids or []
        found[1] += [] if choice.logprobs is None else choice.logprobs.token_logprobs
        found[2] += choice.text
        found[3] = choice.finish_reason


def prompt(length: int) -> list[int]:
    draw = random.Random(SEED + length)
    return [draw.randrange(32, 127) for _ in range(length)]


def begin(pool: ThreadPoolExecutor, stream: Stream) -> Future[dict[int, list[Any]]]:
    reading = pool.submit(stream.read)
    assert stream.begun.wait(PATIENCE_S)
    return reading


def samples(api: openai.OpenAI, name: str, labels: str = ".*") -> list[float]:
    """What the frontend's /metrics shows. `labels`: without the model, of which there is one."""
    metrics = without_model(httpx.get(f"{str(api.base_url).removesuffix('/v1/')}/metrics").text)
    return [float(value) for value in re.findall(rf"^{name}{{{labels}}} (\S+)$", metrics, re.MULTILINE)]


def without_model(metrics: str) -> str:
    """The text of /metrics without the label `model`."""
    return re.sub(r'\bmodel="[^"]*",?', "", metrics)


def requests(pair: LlmServer) -> list[dict[str, Any]]:
    """As `dynamo requests` shows them, without the start of a process: streams go on meanwhile."""
    found: list[dict[str, Any]] = ControlClient(pair.paths).do(LIST_REQUESTS, query={"limit": "1000"})["requests"]
    return found


def migrate(pair: LlmServer, source: str, *, to: str | None = None, cold: bool = False) -> list[dict[str, Any]]:
    """As `dynamo migrate --from` does it, without the start of a process."""
    wish = {"from": source, "to": to, "cold": cold}
    found: list[dict[str, Any]] = ControlClient(pair.paths).do(MIGRATE, wish, timeout_s=PATIENCE_S)["data"]
    return found


def streamed_text(client: openai.OpenAI, prompt: str, tokens: int, begun: threading.Event, **sampling: Any) -> str:
    """Return an answer of that many tokens, streamed. `begun` is set once its first tokens have come."""
    options = {"ignore_eos": True}
    text = ""
    for chunk in client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=tokens, stream=True, extra_body=options, **sampling
    ):
        begun.set()
        text += chunk.choices[0].text
    return text
