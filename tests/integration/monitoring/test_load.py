"""`dynamo load` against `dynamo serve`, with the mocker for an engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dynamo_local.load.runs import Run, read
from tests.integration.server_process import READY_WITHIN_S, ServerProcess

pytestmark = pytest.mark.integration

LOAD_WITHIN_S = 240.0


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
        "--VllmWorker.engine=mocker",
        "--VllmWorker.mocker-speedup=4",
        "--VllmWorker.ServiceArgs.workers=2",
        "--cpu-slots=2",
        "--namespace=load",
        "--port=0",
    ]
    with ServerProcess(tmp_path_factory.mktemp("load") / "state", "load", arguments) as server:
        server.line("API ready at", within_s=READY_WITHIN_S)
        yield server


@pytest.fixture(scope="module")
def url(server: ServerProcess) -> str:
    """Return the address of the server."""
    return next(word for word in server.lines[-1].split() if word.startswith("http://"))


def load(url: str, path: Path, *arguments: str) -> Run:
    """Run the command, and read what it saved."""
    command = [sys.executable, "-m", "dynamo_local.cli.main", "load", "--url", url, "--json", str(path), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LOAD_WITHIN_S)
    assert done.returncode == 0, done.stderr
    assert "time to first token" in done.stdout
    return read(path)


def test_lengths_are_exact_and_two_runs_can_be_compared(url: str, tmp_path: Path) -> None:
    shape = ["--requests=40", "--input=power:1.5:1-900", "--output=1-40", "--slo=ttft=1h"]
    runs = [load(url, tmp_path / f"{rate}.json", f"--rate={rate}", *shape) for rate in ("20", "gamma:40:2")]
    for run in runs:
        assert run.figures.completed == 40, run.figures.errors
        for request in run.requests:
            assert (request.prompt_tokens, request.tokens) == (request.input_tokens, request.output_tokens)
        assert run.figures.goodput is not None
        assert run.figures.goodput.share == 1.0
    assert [r.input_tokens for r in runs[0].requests] == [r.input_tokens for r in runs[1].requests]
    paths = [str(tmp_path / name) for name in ("20.json", "gamma:40:2.json")]
    command = [sys.executable, "-m", "dynamo_local.cli.main", "load", "compare", *paths, "--json"]
    compared = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert compared["differing"] == {"rate": ["20", "gamma:40:2"]}


def test_a_trace_with_shared_blocks_is_served(url: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 50 * index, "input_length": 1100, "output_length": 4, "hash_ids": [0, 1, 100 + index]}
        for index in range(10)
    ]
    trace.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    run = load(url, tmp_path / "run.json", f"--trace={trace}", "--max-output=3")
    assert [(request.prompt_tokens, request.tokens) for request in run.requests] == [(1100, 3)] * 10


def test_a_chat_is_loaded_by_streams(url: str, tmp_path: Path) -> None:
    run = load(url, tmp_path / "run.json", "--concurrency=3", "--requests=9", "--chat", "--input=20", "--output=16")
    assert run.figures.completed == 9, run.figures.errors
    assert run.figures.most_at_once == 3
    assert [request.tokens for request in run.requests] == [16] * 9


def test_what_the_server_refuses_is_counted(url: str) -> None:
    arguments = ["load", "--url", url, "--rate=50", "--requests=3", "--input=9000", "--json=-"]
    command = [sys.executable, "-m", "dynamo_local.cli.main", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LOAD_WITHIN_S)
    assert done.returncode == 1
    assert json.loads(done.stdout)["figures"]["errors"] == {"HTTP 400": 3}
    assert "failed    3 HTTP 400: This model's maximum context length" in done.stderr


def test_a_running_server_is_found_by_its_model_and_asked(server: ServerProcess) -> None:
    command = [sys.executable, "-m", "dynamo_local.cli.main"]
    ask = ["run", "quickstart", "Say something", "--max-tokens=7", "--json"]
    done = subprocess.run(
        [*command, *ask],
        env=dict(server.environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LOAD_WITHIN_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["usage"]["completion_tokens"] == 7
    checked = subprocess.run([*command, "doctor", "--json"], env=dict(server.environ), capture_output=True, check=False)
    found = {finding["check"]: finding["found"] for finding in json.loads(checked.stdout)["findings"]}
    assert found["server load"].startswith("ready at http://127.0.0.1:")


def test_connections_wait_for_the_successor_of_a_killed_frontend(server: ServerProcess, url: str) -> None:
    killed = server.pid("Frontend")
    os.kill(killed, signal.SIGKILL)

    def ask(_: int) -> int:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=READY_WITHIN_S) as answer:
            return int(answer.status)

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(ask, range(4))) == [200] * 4
    assert server.pid("Frontend") != killed
