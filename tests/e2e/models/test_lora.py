"""LoRA adapters on real vLLM: the same prompt through the model and two adapters, on the way that requests can take.

Their prompts and salts are the same throughout, so that a KV block of one is taken for another's wherever that is
possible at all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import ADAPTERS
from tests.e2e.llm_server import PATIENCE_S, LlmServer, settled
from tests.e2e.streams import migrate, prompt, requests, without_model
from tests.integration.server_process import eventually

pytest.importorskip("vllm", reason="vLLM is not installed")

MODELS = ("random", *ADAPTERS)
DECODE, PREFILL = WORKERS = ("lora_VllmWorker", "lora_PrefillWorker")
TOKENS, FEW = 300, 32
PROMPT = prompt(300)


@pytest.fixture(scope="module")
def server(lora: LlmServer) -> LlmServer:
    return lora


def ask(server: LlmServer, model: str, salt: str, **fields: Any) -> httpx.Response:
    body = {
        "model": model, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True,
        "cache_salt": salt, "return_token_ids": True, **fields,
    }  # fmt: skip
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S)


def tokens_of(reply: httpx.Response) -> list[int]:
    assert reply.status_code == 200, reply.text
    found: list[int] = reply.json()["choices"][0]["token_ids"]
    return found


def together(
    server: LlmServer, salt: str, meanwhile: Callable[[], None] | None = None, **fields: Any
) -> dict[str, list[int]]:
    """What each answers when all are asked at once; `meanwhile` is called when each has a token."""
    with ThreadPoolExecutor(len(MODELS)) as pool:
        asked = {model: pool.submit(ask, server, model, salt, **fields) for model in MODELS}
        if meanwhile is not None:
            eventually(lambda: begun(server, asked.values()), "not all have a token", PATIENCE_S)
            meanwhile()
        return {model: tokens_of(reply.result()) for model, reply in asked.items()}


def begun(server: LlmServer, asked: Collection[Future[httpx.Response]]) -> bool:
    """Whether each request has a token, or is over."""
    with_tokens: int = sum(row["tokens"] > 0 for row in requests(server))
    return with_tokens + sum(reply.done() for reply in asked) >= len(asked)


def counters(server: LlmServer, name: str) -> dict[str, float]:
    """What the frontend's /metrics shows, by labels."""
    metrics = without_model(httpx.get(f"{server.url}/metrics").text)
    return {
        labels: float(value) for labels, value in re.findall(rf"^{name}(?:{{(.*)}})? (\S+)$", metrics, re.MULTILINE)
    }


@pytest.fixture(scope="module")
def alone(server: LlmServer) -> dict[str, list[int]]:
    """Each without the others, one after the other."""
    found = {model: tokens_of(ask(server, model, f"alone {model}")) for model in MODELS}
    assert len({tuple(tokens[:FEW]) for tokens in found.values()}) == len(MODELS)
    return found


def test_adapters_are_listed_and_nothing_else_is_a_model(server: LlmServer) -> None:
    listed = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert [(card["id"], card["parent"]) for card in listed] == [
        ("random", None),
        ("pirate", "random"),
        ("robot", "random"),
    ]
    for card in listed:
        assert httpx.get(f"{server.url}/v1/models/{card['id']}").json()["parent"] == card["parent"]
    assert ask(server, "parrot", "unknown").status_code == 404


def test_each_prompt_is_prefilled_elsewhere_with_its_own_adapter(
    server: LlmServer, alone: dict[str, list[int]]
) -> None:
    before = counters(server, "dynamo_prefills_total")
    first = together(server, "remote", max_tokens=FEW)
    after = counters(server, "dynamo_prefills_total")
    again = together(server, "remote", max_tokens=FEW)
    assert first == again == {model: tokens[:FEW] for model, tokens in alone.items()}
    more = {key: value - before.get(key, 0) for key, value in after.items() if value != before.get(key, 0)}
    assert more == {'outcome="long"': 3, 'outcome="prefilled elsewhere"': 3}
    assert counters(server, "dynamo_prefills_total")['outcome="cached"'] == 3


def test_log_probabilities_of_the_prompt_are_refused_and_harm_nobody(
    server: LlmServer, alone: dict[str, list[int]]
) -> None:
    refused = [ask(server, model, "refused", prompt_logprobs=1, max_tokens=1) for model in MODELS]
    assert {reply.status_code for reply in refused} == {400}
    assert "where LoRA is enabled" in refused[0].json()["error"]["message"]
    assert tokens_of(ask(server, "pirate", "after", max_tokens=FEW)) == alone["pirate"][:FEW]


@pytest.fixture(scope="module")
def decoding(server: LlmServer) -> LlmServer:
    """The server, in which both workers decode."""
    server.command("role", PREFILL, "decode")
    return server


@pytest.mark.parametrize("cold", [False, True], ids=["with its KV", "cold"])
async def test_streams_move_with_their_adapters(decoding: LlmServer, alone: dict[str, list[int]], cold: bool) -> None:
    results: list[dict[str, Any]] = []
    pulled = sum(counters(decoding, "dynamo_migrations_pulled_tokens_total").values())

    def move() -> None:
        for worker in WORKERS:
            results.extend(migrate(decoding, worker, cold=cold))

    assert together(decoding, f"moved {cold}", move) == alone
    # Some may be over before it is their turn.
    assert {one["why"] for one in results if one["outcome"] != "migrated"} <= {"the request is over"}
    moved = {one["request"] for one in results if one["outcome"] == "migrated"}
    assert moved
    more = sum(counters(decoding, "dynamo_migrations_pulled_tokens_total").values()) - pulled
    assert more == 0 if cold else more > 0
    await decoding.until(settled, "blocks are still held or pinned")
