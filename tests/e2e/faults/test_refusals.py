"""What clients are refused, and how: OpenAI's error shape, the right status, and the server none the worse."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.conftest import ORIGIN
from tests.e2e.llm_server import PATIENCE_S, LlmServer
from tests.integration.server_process import eventually

MODEL = "random"


def post(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post("/v1/completions", json={"model": MODEL, "prompt": "hello", "max_tokens": 4, **fields})


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert {"message", "type", "param", "code"} <= error.keys()
    return error


def test_unknown_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="nobody", prompt="hello")


def test_wrong_key(served: LlmServer) -> None:
    stranger = openai.OpenAI(base_url=f"{served.url}/v1", api_key="guess", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"prompt": "x" * 5000}, ""),
        ({"n": 19}, "(setting max-n)"),
        ({"logprobs": 21}, "(setting max-candidates)"),
        ({"logprobs": -1}, "(setting max-candidates)"),
        ({"n": "19"}, "(setting max-n)"),
        ({"n": "x"}, "n is a string"),
        ({"prompt": ["x"] * 65}, "(setting max-prompts)"),
        ({"kv_transfer_params": {"remote_host": "127.0.0.1"}}, "kv_transfer_params"),
    ],
)
def test_bad_request(http: httpx.Client, fields: dict[str, Any], names: str) -> None:
    response = post(http, **fields)
    assert response.status_code == 400
    assert names in error_of(response)["message"]


def test_body_that_is_no_json(http: httpx.Client) -> None:
    response = http.post("/v1/completions", content=b'{"model": ', headers={"content-type": "application/json"})
    assert response.status_code == 400
    error_of(response)


def test_body_that_is_too_large(http: httpx.Client) -> None:
    response = post(http, prompt="x" * 300_000)
    assert response.status_code == 413
    error_of(response)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/reset_prefix_cache"),
        ("POST", "/sleep"),
        ("POST", "/collective_rpc"),
        ("POST", "/scale_elastic_ep"),
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/inference/v1/generate"),
        ("POST", "/v1/systemone"),
        ("GET", "/server_info"),
        ("GET", "/redoc"),
    ],
)
def test_paths_that_change_the_server_are_closed(http: httpx.Client, method: str, path: str) -> None:
    response = http.request(method, path)
    assert response.status_code == 404
    error_of(response)


def test_more_than_the_limit_under_way(http: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": "hello", "n": 8, "max_tokens": 3000, "ignore_eos": True, "stream": True}
    begun: list[Iterator[str]] = []
    with ExitStack() as streams:
        for _ in range(3):
            stream = streams.enter_context(http.stream("POST", "/v1/completions", json=body))
            assert stream.status_code == 200
            begun.append(stream.iter_lines())
            next(begun[-1])
        with ThreadPoolExecutor(4) as pool:
            responses = list(pool.map(lambda _: post(http, n=8), range(4)))
        for response in responses:
            assert response.status_code == 429
            assert int(response.headers["retry-after"]) > 0
            assert "24" in error_of(response)["message"]
    # The clients have left.
    eventually(lambda: post(http).status_code == 200, "there is no place again", PATIENCE_S)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions/batch", {"messages": [[{"role": "user", "content": "x"}]] * 65}),
        ("/generative_scoring", {"query": "x", "items": ["x"] * 65, "label_token_ids": [1]}),
        ("/generative_scoring", {"query": "x", "items": ["x"], "label_token_ids": [1] * 21}),
        ("/invocations", {"prompt": ["x"] * 65}),
        ("/invocations", {"messages": [{"role": "user", "content": "x"}], "n": 19}),
    ],
)
def test_limits_hold_on_every_path(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    response = http.post(path, json={"model": MODEL, **body})
    assert response.status_code == 400
    assert "(setting max-" in error_of(response)["message"]


def test_a_limit_that_was_raised_is_raised(http: httpx.Client) -> None:
    response = post(http, n=18, max_tokens=1)
    assert (response.status_code, len(response.json()["choices"])) == (200, 18)


def test_a_large_head(http: httpx.Client) -> None:
    for headers in ({"X-Much": "x" * 200_000}, {f"X-Many-{number}": "x" for number in range(5000)}):
        response = http.get("/v1/models", headers=headers)
        assert response.status_code == 431
        error_of(response)


def test_a_refusal_names_the_settings_of_this_project(http: httpx.Client) -> None:
    """vLLM itself says which of its own options are missing."""
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
    hello = {"role": "user", "content": "x"}
    response = http.post("/v1/chat/completions", json={"model": MODEL, "messages": [hello], "tools": [tool]})
    assert response.status_code == 400
    message = error_of(response)["message"]
    assert "--Frontend.enable-auto-tool-choice" in message
    assert "--Frontend.tool-call-parser" in message


def test_pages_of_one_origin_are_let_in_and_no_others(http: httpx.Client) -> None:
    for origin, let_in in ((ORIGIN, ORIGIN), ("https://elsewhere.example", None)):
        response = http.get("/v1/models", headers={"Origin": origin})
        assert response.status_code == 200
        assert response.headers.get("access-control-allow-origin") == let_in
        asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        response = http.options("/v1/chat/completions", headers=asked)
        assert response.is_success == (let_in is not None)


@pytest.mark.parametrize(
    ("method", "path", "status", "more"),
    [
        ("GET", "/health", 200, {}),
        ("POST", "/v1/completions", 400, {"content": b"nothing"}),
        ("POST", "/v1/completions", 401, {"headers": {"Authorization": "Bearer guess"}}),
        ("POST", "/nowhere", 404, {}),
        ("POST", "/v1/completions", 404, {"json": {"model": "nobody", "prompt": "x"}}),
        ("DELETE", "/v1/models", 405, {}),
        ("POST", "/v1/completions", 413, {"content": b"x" * 300_000}),
        ("POST", "/v1/completions", 200, {"json": {"model": MODEL, "prompt": "x", "max_tokens": 1}}),
    ],
)
def test_every_answer_can_be_read_by_a_page_and_has_an_id(
    http: httpx.Client, method: str, path: str, status: int, more: dict[str, Any]
) -> None:
    headers = {"Origin": ORIGIN, "X-Request-Id": "mine-1", **more.get("headers", {})}
    response = http.request(method, path, **{**more, "headers": headers})
    assert response.status_code == status
    assert response.headers.get_list("access-control-allow-origin") == [ORIGIN]
    assert response.headers.get_list("x-request-id") == ["mine-1"]
    if status >= 400:
        error_of(response)


def test_a_request_that_fails_fails_alone(http: httpx.Client) -> None:
    with ThreadPoolExecutor(2) as pool:
        good = pool.submit(post, http, max_tokens=60, ignore_eos=True)
        bad = pool.submit(post, http, guided_json={"type": "nonsense"}, structured_outputs={"regex": "("})
        assert bad.result().status_code == 400
        assert good.result().status_code == 200
        assert good.result().json()["usage"]["completion_tokens"] == 60
