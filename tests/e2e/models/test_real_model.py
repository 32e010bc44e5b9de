"""A real language model in bfloat16: prefilled elsewhere, moved, and surviving its worker, judged by the oracle
(tests/real_model/oracle.py). In float32 its answers are compared token for token (`make families`)."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from dynamo_local.core.errors import UsageError
from dynamo_local.core.messages.presence import Presence
from dynamo_local.model.named.smollm2 import smollm2
from tests.e2e.llm_server import PATIENCE_S, LlmServer, child
from tests.e2e.streams import Stream, begin, migrate, samples
from tests.real_model.oracle import Verdict, judge

MODEL = "smollm2"
WORKERS = ("real_VllmWorker", "real_VllmWorker_1")
REMOTE_FROM = 64
STREAMS = 4
TOKENS = 80
"""Of each stream."""
TOPICS = ("a sailor", "the winter", "a clock", "bread", "the moon", "a violin", "rivers", "a letter")
ROWS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seed, top-p, top-k": {"temperature": 0.9, "seed": 8, "top_p": 0.9, "top_k": 40},
    "penalties": {"temperature": 0, "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "regular expression": {"temperature": 0, "structured_outputs": {"regex": "([a-z]+ )+"}},
}
STORY = "Once upon a time there was an old town by the sea, and the people who lived there told each other stories. "


def served(root: Path, *more: str) -> LlmServer:
    """`disagg` with two decode workers."""
    try:
        smollm2(print)
    except UsageError as error:
        pytest.skip(str(error))
    options = [
        "examples.llm.graphs.disagg:Frontend",
        "--file=examples/llm/configs/disagg.yaml",
        f"--model={MODEL}",
        "--Common.max-model-len=2048",
        f"--Frontend.max-local-prefill-length={REMOTE_FROM}",
        "--VllmWorker.ServiceArgs.workers=2",
        "--cpu-slots=3",
        f"--drain-timeout={PATIENCE_S}",
        f"--Frontend.drain-timeout-s={PATIENCE_S}",
        f"--VllmWorker.drain-timeout-s={PATIENCE_S}",
        *more,
    ]
    return LlmServer(root / "state", "real", options)


def client_of(server: LlmServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def real(turn: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlmServer]:
    """In bfloat16, as such a model is served."""
    with served(tmp_path_factory.mktemp("real")) as server:
        server.await_ready()
        server.await_workers(3)
        yield server


@pytest.fixture(scope="module")
def real_float32(turn: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlmServer]:
    precise = [f"--{worker}.dtype=float32" for worker in ("VllmWorker", "PrefillWorker")]
    with served(tmp_path_factory.mktemp("float32"), *precise) as server:
        server.await_ready()
        server.await_workers(3)
        yield server


@pytest.fixture(scope="module")
def api(real: LlmServer) -> Iterator[openai.OpenAI]:
    with client_of(real) as client:
        yield client


def prompt(api: openai.OpenAI, number: int, repeats: int) -> list[int]:
    """A request for a story, in tokens; the longer, the more `repeats`."""
    text = STORY * repeats + f"Here is story {number}, about {TOPICS[number % len(TOPICS)]}:"
    answer = httpx.post(f"{api.base_url}".replace("/v1/", "/tokenize"), json={"model": MODEL, "prompt": text})
    tokens: list[int] = answer.raise_for_status().json()["tokens"]
    return tokens


def streams(api: openai.OpenAI, salt: str, repeats: Sequence[int]) -> list[Stream]:
    options = {"temperature": 0}
    return [
        Stream(api, prompt(api, number, repeats[number % len(repeats)]), TOKENS, options, salt, MODEL)
        for number in range(STREAMS)
    ]


def verdict(api: openai.OpenAI, prompt: list[int], tokens: list[int]) -> Verdict:
    """The oracle's, by one prefill of prompt and answer."""
    extra = {"prompt_logprobs": 1, "cache_salt": str(random.random())}
    answer = api.completions.create(model=MODEL, prompt=prompt + tokens, max_tokens=1, temperature=0, extra_body=extra)
    (choice,) = answer.choices
    assert choice.model_extra is not None
    return judge(choice.model_extra["prompt_logprobs"], tokens)


def assert_greedy(api: openai.OpenAI, asked: Sequence[Stream], answers: Sequence[list[int]]) -> None:
    """Each answer is whole, and each of its tokens the greedy one. That one is lost would be noticed."""
    for stream, tokens in zip(asked, answers, strict=True):
        assert len(tokens) == TOKENS
        assert verdict(api, stream.prompt, tokens).wrong == ()
    lost = answers[0][: TOKENS // 2] + answers[0][TOKENS // 2 + 1 :]
    assert verdict(api, asked[0].prompt, lost).wrong


def holding_nothing(workers: Sequence[Presence]) -> bool:
    loads = [worker.load for worker in workers]
    return len(loads) == 3 and all(load is not None and not load.kv_usage and not load.kv_pinned for load in loads)


def prefilled_elsewhere(api: openai.OpenAI) -> float:
    return sum(samples(api, "dynamo_prefills_total", 'outcome="prefilled elsewhere"'))


def undisturbed(asked: Stream) -> list[int]:
    tokens: list[int] = asked.read()[0][0]
    return tokens


def test_it_knows_what_it_says(api: openai.OpenAI, real: LlmServer) -> None:
    question = "What is the capital of France? Answer in one sentence."
    answer = api.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": question}], max_tokens=20, temperature=0
    )
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"


def test_alone_a_stream_is_the_same_twice(api: openai.OpenAI, real: LlmServer) -> None:
    asked = [streams(api, salt, [0])[0] for salt in ("once", "again")]
    first, second = (undisturbed(stream) for stream in asked)
    assert first == second
    assert_greedy(api, asked, [first, second])


async def test_moved_streams_bring_greedy_tokens(api: openai.OpenAI, real: LlmServer) -> None:
    """Short prompts and long ones, which the prefill worker computes."""
    asked = streams(api, "moved", [0, 5])
    before = prefilled_elsewhere(api)
    with ThreadPoolExecutor(STREAMS) as pool:
        reading = [begin(pool, each) for each in asked]
        results = [result for worker in WORKERS for result in migrate(real, worker)]
        answers = [each.result()[0][0] for each in reading]
    assert any(result["outcome"] == "migrated" for result in results), results
    assert prefilled_elsewhere(api) > before
    assert_greedy(api, asked, answers)
    await real.until(holding_nothing, "blocks are still held or pinned")


@pytest.mark.families
@pytest.mark.parametrize("row", ROWS)
async def test_in_float32_a_row_of_fidelity_is_the_same_when_it_moves(real_float32: LlmServer, row: str) -> None:
    """In bfloat16 the draws are the same as well, but not what is drawn from: what a worker computes of the context
    while a request moves to it, it computes several tokens at a time, and rounds otherwise."""
    with client_of(real_float32) as api, ThreadPoolExecutor(1) as pool:
        left, moved = (Stream(api, prompt(api, 0, 2), TOKENS, ROWS[row], f"{row} {salt}", MODEL) for salt in ("a", "b"))
        alone = undisturbed(left)
        reading = begin(pool, moved)
        results = [result for worker in WORKERS for result in migrate(real_float32, worker)]
        tokens = reading.result()[0][0]
    assert any(result["outcome"] == "migrated" for result in results), results
    assert tokens == alone
    await real_float32.until(holding_nothing, "blocks are still held or pinned")


async def test_streams_survive_an_engine_and_bring_greedy_tokens(api: openai.OpenAI, real: LlmServer) -> None:
    asked = streams(api, "killed", [0, 5])
    with ThreadPoolExecutor(STREAMS) as pool:
        reading = [begin(pool, each) for each in asked]
        os.kill(child(real.pid("VllmWorker"), "EngineCore"), signal.SIGKILL)
        answers = [each.result()[0][0] for each in reading]
    assert_greedy(api, asked, answers)
    real.await_workers(3)
