"""Prefill and decode on separate workers with real vLLM, as clients and operators see it."""

from __future__ import annotations

import json
import os
import random
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from msgspec.structs import replace

from dynamo_local.core.messages.presence import Load, Presence
from tests.e2e.llm_server import PATIENCE_S, LlmServer, none_of, settled
from tests.integration.server_process import eventually

MODEL = "random"
PROMPTS = 80
LONGEST = 4000
REMOTE_FROM = 64
"""Prompts of more tokens are prefilled by the prefill worker."""
SEED = 20260311
SAMPLED: list[dict[str, Any]] = [
    {"max_tokens": 1},
    {"n": 3, "temperature": 1.0, "seed": 7},
    {"logprobs": 2, "echo": True},
    {"temperature": 1.0, "seed": 3},
    {"presence_penalty": 1.0},
]
NO_LOAD = Load(running=0, waiting=0, kv_usage=0.0)


@pytest.fixture(scope="module")
def disagg(turn: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlmServer]:
    """`disagg` with one worker in each role."""
    options = [
        "examples.llm.graphs.disagg:Frontend",
        "--file=examples/llm/configs/disagg.yaml",
        "--model=random",
        f"--Frontend.max-local-prefill-length={REMOTE_FROM}",
        "--Frontend.max-prefill-queue-size=100",
        "--Frontend.reasoning-parser=qwen3",
        "--VllmWorker.dtype=float32",
        "--PrefillWorker.dtype=float32",
        f"--drain-timeout={PATIENCE_S}",
        f"--Frontend.drain-timeout-s={PATIENCE_S}",
        f"--VllmWorker.drain-timeout-s={PATIENCE_S}",
        f"--PrefillWorker.drain-timeout-s={PATIENCE_S}",
    ]
    with LlmServer(tmp_path_factory.mktemp("disagg") / "state", "disagg", options) as server:
        server.await_ready()
        server.await_workers(2)
        yield server


@pytest.fixture(scope="module")
def api(disagg: LlmServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=disagg.url, timeout=PATIENCE_S) as client:
        yield client


def ask(api: httpx.Client, prompt: list[int], salt: str, **options: Any) -> dict[str, Any]:
    """A completion that finds nothing cached, unless it is of the same salt."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 12, "temperature": 0, "cache_salt": salt, **options}
    answer = api.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def text(answer: dict[str, Any]) -> str:
    (choice,) = answer["choices"]
    found: str = choice["text"]
    return found


def idle(workers: list[Presence]) -> bool:
    """Wait as `settled` does, for workers that have made no step since they were started, and so tell of no load."""
    return settled([w if w.load is not None else replace(w, load=NO_LOAD) for w in workers])


def prompts(number: int) -> list[list[int]]:
    """Prompts of 1 to 4,000 tokens, short and long ones alike likely; the same ones first, however many."""
    draws = [random.Random(SEED + n) for n in range(number)]
    lengths = [1, 31, 32, 33, 64, 65, 2048, LONGEST]
    lengths += [round(LONGEST ** draw.random()) for draw in draws[len(lengths) :]]
    return [[draw.randrange(200) for _ in range(length)] for draw, length in zip(draws, lengths, strict=False)]


def prefills(api: httpx.Client) -> dict[str, int]:
    """The frontend's counters: what was decided, and what became of it."""
    found = re.findall(r'dynamo_prefills_total\{model="[^"]*",outcome="([^"]+)"\} ([0-9.]+)', api.get("/metrics").text)
    return {outcome: round(float(count)) for outcome, count in found}


def prefilled_elsewhere_from(disagg: LlmServer, api: httpx.Client, tokens: int) -> None:
    """Set that, and wait until the frontend goes by it: it is told of a change, and reads it then."""
    disagg.command("config", "set", "max-local-prefill-length", str(tokens))

    def holds() -> bool:
        before = prefills(api).get("short", 0)
        ask(api, [*range(REMOTE_FROM + 8)], f"limit {uuid4()}", max_tokens=1)
        return (prefills(api).get("short", 0) > before) == (tokens > REMOTE_FROM)

    eventually(holds, "the frontend goes by another limit", PATIENCE_S)


@pytest.fixture(scope="module")
def right(disagg: LlmServer, api: httpx.Client) -> list[str]:
    """The answers to the prompts, of the decode worker alone."""
    prefilled_elsewhere_from(disagg, api, LONGEST)
    remote = prefills(api).get("long", 0)
    with ThreadPoolExecutor(8) as pool:
        answers = [text(answer) for answer in pool.map(lambda p: ask(api, p, "alone"), prompts(PROMPTS))]
    assert prefills(api).get("long", 0) == remote
    prefilled_elsewhere_from(disagg, api, REMOTE_FROM)
    return answers


async def test_answers_are_those_of_one_worker_alone(disagg: LlmServer, api: httpx.Client, right: list[str]) -> None:
    asked = prompts(PROMPTS)
    before = prefills(api)
    with ThreadPoolExecutor(8) as pool:
        together = [text(answer) for answer in pool.map(lambda p: ask(api, p, "together"), asked)]
    after = prefills(api)
    assert together == right
    long = sum(len(prompt) > REMOTE_FROM for prompt in asked)
    elsewhere = after["prefilled elsewhere"] - before.get("prefilled elsewhere", 0)
    # It is an offer: on a busy machine, a worker that does not answer for a while is not waited for.
    assert 0.8 * long <= elsewhere <= long
    await disagg.until(settled, "blocks are still held or pinned")


def test_what_the_decode_worker_has_is_not_prefilled_elsewhere(disagg: LlmServer, api: httpx.Client) -> None:
    prompt = prompts(8)[6]
    first = ask(api, prompt, "again")
    counted = prefills(api)
    assert text(ask(api, prompt, "again")) == text(first)
    assert prefills(api)["cached"] == counted.get("cached", 0) + 1
    assert prefills(api)["long"] == counted["long"]


def test_sampling_is_the_same_wherever_the_prompt_was_prefilled(disagg: LlmServer, api: httpx.Client) -> None:
    prompt = prompts(7)[6][:400]

    def answers(where: str) -> list[Any]:
        with ThreadPoolExecutor(len(SAMPLED)) as pool:
            return list(pool.map(lambda options: ask(api, prompt, f"{where} {options}", **options), SAMPLED))

    before = prefills(api).get("prefilled elsewhere", 0)
    remote = answers("remote")
    assert prefills(api)["prefilled elsewhere"] > before
    prefilled_elsewhere_from(disagg, api, LONGEST)
    local = answers("local")
    prefilled_elsewhere_from(disagg, api, REMOTE_FROM)
    for options, one, other in zip(SAMPLED, remote, local, strict=True):
        texts = [[choice["text"] for choice in answer["choices"]] for answer in (one, other)]
        assert texts[0] == texts[1], options
        assert one["usage"] == other["usage"], options


@pytest.mark.parametrize("victim", ["PrefillWorker", "VllmWorker", "Nats"])
async def test_requests_survive_a_kill(disagg: LlmServer, api: httpx.Client, right: list[str], victim: str) -> None:
    asked, expected = prompts(50)[8:], right[8:50]
    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(ask, api, prompt, f"{victim} killed") for prompt in asked]
        answers[10].result()
        os.kill(disagg.pid(victim), signal.SIGKILL)
        assert [text(answer.result()) for answer in answers] == expected
    disagg.await_workers(2)
    await disagg.until(idle, "blocks are still held or pinned")


async def test_workers_change_their_roles_while_they_run(
    disagg: LlmServer, api: httpx.Client, right: list[str]
) -> None:
    asked, expected = prompts(20), right[:20]
    pids = {name: disagg.pid(name) for name in ("VllmWorker", "PrefillWorker")}
    disagg.command("role", "disagg_PrefillWorker", "decode")
    disagg.command("role", "disagg_VllmWorker", "prefill")
    disagg.await_workers(2)
    assert {row["watcher"]: row["role"] for row in disagg.ps() if row["role"] in ("prefill", "decode")} == {
        "disagg_PrefillWorker": "decode",
        "disagg_VllmWorker": "prefill",
    }
    before = prefills(api).get("prefilled elsewhere", 0)
    assert [text(ask(api, prompt, "turned")) for prompt in asked] == expected
    assert prefills(api)["prefilled elsewhere"] > before
    assert pids == {name: disagg.pid(name) for name in pids}
    disagg.command("role", "disagg_VllmWorker", "decode")
    disagg.command("role", "disagg_PrefillWorker", "prefill")
    await disagg.until(settled, "blocks are still held or pinned")


@pytest.mark.parametrize("thinking", [True, False])
def test_a_grammar_begins_behind_the_reasoning(api: httpx.Client, thinking: bool) -> None:
    """The parser is given to the frontend alone, and the engines know of it."""
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 5}}, "required": ["a"]}
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Say something"}],
        "max_tokens": 100,
        "temperature": 0,
        "response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": schema}},
        "chat_template_kwargs": {"enable_thinking": thinking},
    }
    message = api.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    if thinking:
        # The model never ends its reasoning, which is free of the grammar.
        assert message["content"] is None
        assert not message["reasoning"].lstrip().startswith("{")
    else:
        assert message["reasoning"] is None
        assert message["content"].lstrip().startswith("{")


def test_the_queue_is_shown_and_empty(disagg: LlmServer) -> None:
    shown = json.loads(disagg.command("queue", "ls", "--json"))
    assert (shown["waiting"], shown["in_hand"]) == (0, 0)


@pytest.mark.ends_server
def test_nothing_is_left_when_it_ends(disagg: LlmServer) -> None:
    tree = disagg.tree()
    disagg.signal(signal.SIGTERM)
    assert disagg.end(PATIENCE_S) == 0
    assert none_of(tree)
    assert not list(Path("/dev/shm").glob("*disagg*"))
