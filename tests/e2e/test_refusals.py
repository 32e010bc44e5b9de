"""What clients are refused, and how: OpenAI's error shape, the right status, and the server none the worse."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.llm_server import PATIENCE_S, LlmServer
from tests.integration.server_process import eventually

MODEL = "quickstart"


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
        ({"n": 17}, "n"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt": ["x"] * 65}, "prompt"),
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
        ("POST", "/invocations"),
        ("POST", "/inference/v1/generate"),
        ("GET", "/server_info"),
        ("GET", "/openapi.json"),
        ("GET", "/docs"),
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


def test_no_cross_origin_access_by_default(http: httpx.Client) -> None:
    response = http.get("/v1/models", headers={"Origin": "https://elsewhere.example"})
    assert response.status_code == 200
    assert "access-control-allow-origin" not in response.headers


def test_a_request_that_fails_fails_alone(http: httpx.Client) -> None:
    with ThreadPoolExecutor(2) as pool:
        good = pool.submit(post, http, max_tokens=60, ignore_eos=True)
        bad = pool.submit(post, http, guided_json={"type": "nonsense"}, structured_outputs={"regex": "("})
        assert bad.result().status_code == 400
        assert good.result().status_code == 200
        assert good.result().json()["usage"]["completion_tokens"] == 60
