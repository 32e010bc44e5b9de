"""The table of docs/internals/fidelity.md, row by row, on real vLLM.

Every row is a request that is answered three times: left alone, moved with its KV while it is answered, and moved
without it, which is what happens when its worker dies.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm import SamplingParams
from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

from dynamo_local.core.request.recovery import Fidelity, Survival
from dynamo_local.engine.vllm.requests.continuing import WHEN_USED, survival_of
from tests.e2e.llm_server import PATIENCE_S, LlmServer, settled
from tests.e2e.streams import WORKERS, migrate, prompt, requests

TOKENS, LATE = 400, 320
TEXT = prompt(300)
LETTERS = list(range(97, 123))
LIST_OF_NUMBERS = {"type": "array", "items": {"type": "integer"}, "minItems": 60}
NOTES = {
    "type": "object",
    "properties": {"notes": {"type": "array", "items": {"type": "string"}, "minItems": 60}},
    "required": ["notes"],
}

EXACT: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seed": {"temperature": 1.0, "seed": 7},
    "seed, top-p, top-k, min-p": {"temperature": 0.9, "seed": 8, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "seed, n": {"temperature": 1.0, "seed": 9, "n": 2},
    "stop ids, min tokens": {"stop_token_ids": LETTERS, "min_tokens": LATE},
    "stop strings, min tokens": {"stop": ["e", "t", "a"], "include_stop_str_in_output": True, "min_tokens": LATE},
    "log-probabilities": {"logprobs": 2},
    "log-probabilities of the prompt": {"prompt_logprobs": 1},
    "echo": {"echo": True, "logprobs": 1},
    "repetition penalty": {"repetition_penalty": 1.3},
    "presence penalty": {"presence_penalty": 1.5},
    "frequency penalty": {"frequency_penalty": 1.5},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "logit bias": {"logit_bias": {"65": 4.0, "66": -4.0}},
    "allowed tokens": {"allowed_token_ids": LETTERS},
    "repetition detection": {
        "repetition_detection": {"max_pattern_size": 100, "min_pattern_size": 1, "min_count": 2},
        "allowed_token_ids": LETTERS,
        "min_tokens": LATE,
    },
    "regular expression": {"structured_outputs": {"regex": "([a-z]+ )+"}},
    "JSON schema": {"structured_outputs": {"json": LIST_OF_NUMBERS}},
    "priority": {"priority": 3},
}
PENALTIES = ("repetition penalty", "presence penalty", "frequency penalty", "penalties")
ENDS = {"stop ids, min tokens": "stop", "stop strings, min tokens": "stop", "repetition detection": "repetition"}
DRAWN = {"temperature": {"temperature": 1.0}, "top-p, top-k": {"temperature": 1.0, "top_p": 0.9, "top_k": 40}}
LOST = {"extra arguments": {"vllm_xargs": {"known_to": "an extension"}}}
TOOL = {
    "messages": [{"role": "user", "content": "take notes"}],
    "tools": [{"type": "function", "function": {"name": "note", "parameters": NOTES}}],
    "tool_choice": {"type": "function", "function": {"name": "note"}},
}

Row = dict[str, Any]
"""The fields of a request."""


def ask(pair: LlmServer, row: Row, salt: str) -> dict[str, Any]:
    body = {"model": "random", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "cache_salt": salt}
    path, text = "/v1/completions", {"prompt": TEXT, "return_token_ids": True}
    if "messages" in row:
        path, text = "/v1/chat/completions", {}
    reply = httpx.post(f"{pair.url}{path}", json={**body, **text, **row}, timeout=PATIENCE_S)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def answers(
    pair: LlmServer, rows: dict[str, Row], salt: str, meanwhile: Callable[[], None] | None = None
) -> dict[str, dict[str, Any]]:
    """All rows at once; `meanwhile` is called as soon as each has tokens."""
    with ThreadPoolExecutor(len(rows)) as pool:
        asked = {name: pool.submit(ask, pair, row, salt) for name, row in rows.items()}
        if meanwhile is not None:
            await_tokens(pair, asked)
            meanwhile()
        return {name: each.result() for name, each in asked.items()}


def await_tokens(pair: LlmServer, asked: dict[str, Future[dict[str, Any]]]) -> None:
    """Wait until each request has had some; one that is over has had its own."""
    deadline = time.monotonic() + PATIENCE_S
    begun: set[str] = set()
    while len(begun) < len(asked):
        over = {name: one.result()["id"] for name, one in asked.items() if one.done()}
        assert time.monotonic() < deadline, (len(begun), over)
        begun |= {row["request"] for row in requests(pair) if row["tokens"] > 0}
        begun |= set(over.values())


@pytest.fixture(scope="module")
def exact(pair: LlmServer) -> dict[str, Row]:
    """The rows that are exact. Bad words are such as the answer would bring late."""
    late = ask(pair, {}, "first")["choices"][0]["text"][LATE:]
    words = sorted({late[at : at + 2] for at in range(len(late) - 1) if late[at : at + 2].isalnum()})
    assert words
    return {**EXACT, "bad words": {"bad_words": words[:8]}, "forced tool": TOOL}


@pytest.fixture(scope="module")
def alone(pair: LlmServer, exact: dict[str, Row]) -> dict[str, dict[str, Any]]:
    found = answers(pair, exact, "alone")
    greedy = found["greedy"]["choices"][0]["text"]
    # What they ask for has an effect, some of it not before they move.
    assert not {name for name in ("bad words", *PENALTIES) if found[name]["choices"][0]["text"] == greedy}
    assert {name: found[name]["choices"][0]["finish_reason"] for name in ENDS} == ENDS
    return found


@pytest.mark.parametrize("cold", [False, True], ids=["with its KV", "cold"])
async def test_each_row(pair: LlmServer, exact: dict[str, Row], alone: dict[str, dict[str, Any]], cold: bool) -> None:
    """Rows that were neither moved nor refused are asked again, fewer at once, until each has been."""
    left = {**exact, **DRAWN, **LOST}
    deadline = time.monotonic() + 2 * PATIENCE_S
    for attempt in itertools.count():
        found, moved, why = await asyncio.to_thread(answers_moved, pair, left, f"{cold} {attempt}", cold)
        refused = {name for name, cause in why if "would be lost" in cause}
        assert refused <= LOST.keys(), why
        assert not moved & LOST.keys()
        assert set() == {name for name in left.keys() & alone.keys() if not alike_answers(found[name], alone[name])}
        for name in left.keys() - alone.keys():
            (choice,) = found[name]["choices"]
            assert (len(choice["token_ids"]), choice["finish_reason"]) == (TOKENS, "length")
        left = {name: row for name, row in left.items() if name not in moved | refused}
        if not left:
            break
        assert time.monotonic() < deadline, (sorted(left), why)
    await pair.until(settled, "blocks are still held or pinned")


def answers_moved(
    pair: LlmServer, rows: dict[str, Row], salt: str, cold: bool
) -> tuple[dict[str, dict[str, Any]], set[str], set[tuple[str, str]]]:
    """The answers; the rows that were moved; rows and what was said of them."""
    results: list[dict[str, Any]] = []

    def move() -> None:
        with ThreadPoolExecutor(len(WORKERS)) as pool:
            each_worker = pool.map(lambda worker: migrate(pair, worker, cold=cold), WORKERS)
            results.extend(result for each in each_worker for result in each)

    found = answers(pair, rows, salt, move)
    names = {answer["id"]: name for name, answer in found.items()}
    moved = {names[one["request"]] for one in results if one["outcome"] == "migrated"}
    # Who has come to the other worker already is asked to leave that, too. Some may be over before it is their turn,
    # and a worker with other things to do may refuse.
    return found, moved, {(names[one["request"]], one["why"]) for one in results}


def alike_answers(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return alike(one["choices"], other["choices"])


def alike(one: Any, other: Any) -> bool:
    """The same, down to the last bits of log-probabilities: those of a context that is computed anew differ."""
    if isinstance(one, float) and isinstance(other, float):
        return one == pytest.approx(other, abs=1e-3)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(name == "id" or alike(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)


def test_every_field_is_classified() -> None:
    assert set(WHEN_USED) == set(SamplingParams.__struct_fields__)


REPETITION = RepetitionDetectionParams(max_pattern_size=2, min_count=3)
REGEX = StructuredOutputsParams(regex="a+")


@pytest.mark.parametrize(
    ("params", "survival"),
    [
        (SamplingParams(temperature=0), Survival()),
        (SamplingParams(temperature=0, seed=1), Survival()),
        (SamplingParams(temperature=0, stop=["x"], logprobs=3, prompt_logprobs=1), Survival()),
        (SamplingParams(temperature=0, logit_bias={1: 1.0}, min_tokens=3), Survival()),
        (SamplingParams(temperature=0, watermarking=False), Survival()),
        (SamplingParams(temperature=0, presence_penalty=0.1, frequency_penalty=0.1), Survival()),
        (SamplingParams(temperature=0, bad_words=["x"], repetition_detection=REPETITION), Survival()),
        (SamplingParams(temperature=0.5, top_p=0.9, top_k=3), Survival(Fidelity.DISTRIBUTION, "temperature")),
        (SamplingParams(temperature=0.5, seed=1), Survival(rebuilt=("seed",))),
        (
            SamplingParams(temperature=0.5, structured_outputs=REGEX),
            Survival(Fidelity.DISTRIBUTION, "temperature", ("structured_outputs",)),
        ),
        (SamplingParams(temperature=0, extra_args={}), Survival()),
        (SamplingParams(temperature=0, extra_args={"a": 1}), Survival(Fidelity.NONE, "extra_args")),
        (
            SamplingParams(seed=1, structured_outputs=REGEX, thinking_token_budget=5),
            Survival(Fidelity.NONE, "thinking_token_budget", ("seed", "structured_outputs")),
        ),
    ],
)
def test_a_request_is_as_good_as_its_worst_parameter(params: SamplingParams, survival: Survival) -> None:
    assert survival_of(params) == survival
