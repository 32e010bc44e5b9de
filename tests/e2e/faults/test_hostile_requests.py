"""Requests that are meant to harm, at a whole server: refused for what they are, and of no consequence to others."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.llm_server import LlmServer

MODEL = "random"
IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/image.png"}}


def post(http: httpx.Client, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
    return http.post(path, json={"model": MODEL, **fields})


def refused(response: httpx.Response, names: str) -> None:
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, 400)
    assert names in error["message"]


@pytest.mark.parametrize(
    ("path", "fields", "names"),
    [
        ("/v1/completions", {"prompt": "a", "structured_outputs": {"choice": ["a"] * 1001}}, "max-choices"),
        ("/v1/completions", {"prompt": "a", "structured_outputs": {"regex": "a" * 5000}}, "max-regex-bytes"),
        ("/v1/completions", {"prompt": "a", "request_id": "x" * 100_000}, "request_id"),
        ("/v1/completions", {"prompt": "a", "logprobs": 1, "logprob_token_ids": list(range(21))}, "max-candidates"),
        ("/v1/completions", {"prompt": "a", "bad_words": ["b"] * 1001}, "max-words"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [IMAGE]}]}, "multimodal"),
        ("/tokenize", {"messages": [{"role": "user", "content": [IMAGE]}]}, "multimodal"),
    ],
)
def test_what_is_too_much_is_refused_by_name(http: httpx.Client, path: str, fields: Any, names: str) -> None:
    refused(post(http, path, **fields), names)


def test_an_id_in_a_header_is_judged_as_well(http: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1}
    refused(http.post("/v1/completions", json=body, headers={"X-Request-Id": "x" * 300}), "X-Request-Id")


def test_ids_of_requests_under_way_may_be_the_same(http: httpx.Client) -> None:
    def ask(number: int) -> tuple[int, str, int]:
        prompt = [65 + number] * (number + 3)
        answer = post(http, prompt=prompt, request_id="same", max_tokens=30, ignore_eos=True, temperature=0).json()
        return answer["usage"]["prompt_tokens"], answer["choices"][0]["text"], answer["usage"]["completion_tokens"]

    alone = [ask(number) for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(4))) == alone
    assert [(tokens, written) for tokens, _, written in alone] == [(number + 3, 30) for number in range(4)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "names"),
    [
        ([1, 10**7], "out of vocabulary"),
        ([[65, 66], [67, 10**7]], "out of vocabulary"),
        ([-1], "greater than or equal"),
    ],
)
def test_a_token_that_there_is_not_is_a_bad_request_and_no_event(
    served: LlmServer, http: httpx.Client, prompt: Any, names: str, stream: bool
) -> None:
    before = logged(served)
    for _ in range(3):
        refused(post(http, prompt=prompt, max_tokens=2, stream=stream), names)
    assert "Traceback" not in logged(served)[len(before) :]


def logged(served: LlmServer) -> str:
    """By the frontend."""
    logs = [path for path in Path(served.paths.logs_dir).iterdir() if "Frontend" in path.name]
    assert logs
    return "".join(path.read_text(errors="replace") for path in sorted(logs))


def test_named_log_probabilities_take_nothing_from_others(http: httpx.Client) -> None:
    """vLLM's own engine tells others of the same step of no candidates."""

    def ask(fields: dict[str, Any]) -> list[int]:
        asked = {"prompt": "hello", "max_tokens": 40, "ignore_eos": True, "temperature": 0, **fields}
        top = post(http, **asked).json()["choices"][0]["logprobs"]["top_logprobs"]
        return [len(candidates) for candidates in top]

    named = {"logprobs": 1, "logprob_token_ids": [65]}
    # On two workers: some of them are computed together.
    kinds = [{"logprobs": 5}, named] * 6
    with ThreadPoolExecutor(len(kinds)) as pool:
        answers = list(pool.map(ask, kinds))
    assert all(number >= 5 for answer in answers[::2] for number in answer)
    assert all(number <= 2 for answer in answers[1::2] for number in answer)
