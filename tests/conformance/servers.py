"""The servers that vLLM's tests ask: this project's graphs, and vLLM's own server with the same settings."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dynamo_local.core.errors import DynamoError
from dynamo_local.process.ancestry import PARENT_PID_ENV
from tests.e2e.llm_server import PATIENCE_S, READY_WITHIN_S, LlmServer

# Prompts of tests are short, and most are to go to the prefill worker.
GRAPHS = {"agg_router": (), "disagg": ("--Frontend.max-local-prefill-length=64",)}
"""Graphs by name, with their additional settings."""
WORKERS = 2
"""Number of workers that each example configuration starts."""
VLLM = "vllm"
MAX_MODEL_LEN = 8192
TOOL_CALL_PARSER = "hermes"
GUARDED = (sys.executable, "-m", "dynamo_local.process.guarded", "--")


class ServerError(DynamoError):
    """vLLM's own server did not start."""


@contextmanager
def serving(name: str, model: Path, folder: Path) -> Iterator[str]:
    """Base URL of a server that is ready: one of GRAPHS, or VLLM."""
    with (_vllm if name == VLLM else _graph)(name, model, folder) as url:
        yield url


@contextmanager
def _graph(name: str, model: Path, folder: Path) -> Iterator[str]:
    options = [
        f"examples.llm.graphs.{name}:Frontend",
        f"--file=examples/llm/configs/{name}.yaml",
        f"--model={model}",
        f"--Common.max-model-len={MAX_MODEL_LEN}",
        "--Frontend.enable-auto-tool-choice=true",
        f"--Frontend.tool-call-parser={TOOL_CALL_PARSER}",
        "--Frontend.enable-prompt-tokens-details=true",
        "--Frontend.enable-request-id-headers=true",
        *GRAPHS[name],
    ]
    with LlmServer(folder / "state", "conformance", options) as server:
        server.await_ready()
        server.await_workers(WORKERS)
        yield server.url
        server.signal(signal.SIGTERM)
        server.end(PATIENCE_S)


@contextmanager
def _vllm(_: str, model: Path, folder: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    options = [
        *("--host=127.0.0.1", f"--port={port}", f"--model={model}", f"--max-model-len={MAX_MODEL_LEN}"),
        *("--block-size=32", "--max-num-seqs=64", "--enforce-eager", "--enable-auto-tool-choice"),
        *(f"--tool-call-parser={TOOL_CALL_PARSER}", "--enable-prompt-tokens-details", "--enable-request-id-headers"),
    ]
    environ = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", PARENT_PID_ENV: str(os.getpid())}
    log = folder / "vllm.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            # Should this process be killed, the server goes with it.
            [*GUARDED, sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry", *options],
            env={**os.environ, **environ},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _await_health(url, server, log)
        yield url
    finally:
        server.terminate()
        server.wait(PATIENCE_S)


def _await_health(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_WITHIN_S
    while not _healthy(url):
        if server.poll() is not None or time.monotonic() > deadline:
            last = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise ServerError("vLLM's own server did not start", f"its last words:\n{last}")
        time.sleep(0.2)


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            healthy: bool = answer.status == 200
            return healthy
    except (urllib.error.URLError, OSError):
        return False
