"""A server with a router: turns of a conversation return to the worker that has it, which finds what was predicted."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from dynamo_local.control.client import ControlClient
from dynamo_local.control.descriptions import RouteLine, RoutesView
from dynamo_local.control.operations import LIST_ROUTES
from tests.integration.server_process import PATIENCE_S, READY_WITHIN_S, ServerProcess, eventually

pytestmark = pytest.mark.integration

BLOCK = 16
TURN = 40
"""New tokens of each turn, and of each answer."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Start a server with two workers behind a router, and wait until it is ready."""
    arguments = [
        "-m",
        "dynamo_local.cli.main",
        "serve",
        "examples.llm.graphs.agg_router:Frontend",
        "-f",
        "examples/llm/configs/agg_router.yaml",
        "--Frontend.enable-prompt-tokens-details=true",
        "--VllmWorker.engine=mocker",
        "--VllmWorker.mocker-speedup=20",
        f"--VllmWorker.mocker-block-size={BLOCK}",
        "--VllmWorker.ServiceArgs.workers=2",
        "--cpu-slots=2",
        "--namespace=talks",
        "--port=0",
    ]
    with ServerProcess(tmp_path_factory.mktemp("talks") / "state", "talks", arguments) as server:
        server.line("API ready at", within_s=READY_WITHIN_S)
        yield server


@pytest.fixture(scope="module")
def url(server: ServerProcess) -> str:
    return next(word for word in server.lines[-1].split() if word.startswith("http://")).removesuffix("/v1")


def routes_told(url: str, prompt: list[int], *, stream: bool = False) -> list[dict[str, Any]]:
    """Have a prompt answered with the header that explains its routes."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=PATIENCE_S) as answer:
        model = json.load(answer)["data"][0]["id"]
    body = {"model": model, "prompt": prompt, "max_tokens": 4, "ignore_eos": True, "stream": stream}
    headers = {"Content-Type": "application/json", "X-Dynamo-Explain": "1"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        answer.read()
        found: list[dict[str, Any]] = json.loads(answer.headers["x-dynamo-route"])
    return found


def completed(url: str, prompt: list[int]) -> dict[str, Any]:
    """Have a prompt of tokens answered."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=PATIENCE_S) as answer:
        model = json.load(answer)["data"][0]["id"]
    body = {"model": model, "prompt": prompt, "max_tokens": TURN, "ignore_eos": True, "return_token_ids": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def known_blocks(url: str) -> int:
    with urllib.request.urlopen(f"{url}/metrics", timeout=PATIENCE_S) as answer:
        match = re.search(r"^dynamo_router_index_blocks (\S+)$", answer.read().decode(), re.MULTILINE)
    return 0 if match is None else int(float(match[1]))


def route_of(server: ServerProcess, request: str) -> RouteLine:
    (line,) = routes(server, limit="100", request=request)
    return line


def routes(server: ServerProcess, **query: str) -> tuple[RouteLine, ...]:
    return msgspec.convert(ControlClient(server.paths).do(LIST_ROUTES, query=query), RoutesView).routes


def test_turns_return_to_their_worker_and_find_what_was_predicted(server: ServerProcess, url: str) -> None:
    contexts = [[first + 3] * TURN for first in range(3)]
    workers: dict[int, str | None] = {}
    blocks = 0
    for turn in range(3):
        for number, context in enumerate(contexts):
            answer = completed(url, context)
            route = route_of(server, answer["id"])
            cached = answer["usage"]["prompt_tokens_details"]
            assert (cached or {}).get("cached_tokens", 0) == route.cached, route
            assert workers.setdefault(number, route.worker) == route.worker, route.why
            # Of the answer, its last token has no KV.
            expected = 0 if turn == 0 else (len(context) - TURN - 1) // BLOCK * BLOCK
            assert route.cached == expected
            before = 0 if turn == 0 else (len(context) - TURN - 1) // BLOCK
            context += answer["choices"][0]["token_ids"]
            blocks += (len(context) - 1) // BLOCK - before
            eventually(lambda: known_blocks(url) >= blocks, f"the router knows {blocks} blocks")  # noqa: B023
            context += [number + 7] * TURN


def test_what_was_assigned_is_explained(server: ServerProcess, url: str) -> None:
    request = completed(url, [99] * TURN)["id"]
    command = [sys.executable, "-m", "dynamo_local.cli.main", "route", "--namespace=talks", "--explain", request]
    done = subprocess.run(
        command, env=dict(server.environ), capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    assert "policy kv" in done.stdout
    assert re.search(rf"{request}.*, {TURN} tokens", done.stdout)
    assert re.search(r"^> +VllmWorker", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_tells_in_a_header_where_it_was_computed_and_why(
    server: ServerProcess, url: str, stream: bool
) -> None:
    (route,) = routes_told(url, [77 + stream] * TURN, stream=stream)
    assert route["tokens"] == TURN
    (line,) = routes(server, limit="1")
    assert (route["worker"], route["why"]) == (line.worker, line.why)
    assert route["worker"] in {each["worker"] for each in route["candidates"]}
    assert len(route["candidates"]) == 2
    assert "nobody has the prefix" in route["why"]
