"""`dynamo serve` of an endpoint with a mocker, and clients of it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai

from dynamo_local.core.errors import StateError
from tests.integration.server_process import PATIENCE_S, ServerProcess, eventually

COMMAND = ["-m", "dynamo_local.cli.main"]
NAMESPACE = "stored"


class MockerServer(ServerProcess):
    """A server with the endpoint `chat`."""

    def __init__(self, root: Path, port: int, file: Path, *settings: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        serve = ["serve", "-f", str(file), f"--port={port}", f"--namespace={NAMESPACE}", "--cpu-slots=1", *settings]
        super().__init__(root, NAMESPACE, [*COMMAND, *serve])

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command, with its output as JSON."""
        return subprocess.run(
            [sys.executable, *COMMAND, *arguments, "--json", f"--namespace={NAMESPACE}"],
            env=dict(self.environ),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, timeout=PATIENCE_S)

    def async_client(self, key: str = "none") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, timeout=PATIENCE_S)

    def frontend_pid(self) -> int | None:
        """Pid of the frontend; None while there is none."""
        try:
            return self.pid("Frontend")
        except (AssertionError, KeyError, StateError):
            return None

    def pid_of(self, service: str) -> int:
        """Pid of the first process of a service. Waits until there is one."""
        found: list[int] = []

        def is_there() -> bool:
            found[:] = [each.pid for each in self.processes() if service in each.environ["DYN_WATCHER"]]
            return bool(found)

        eventually(is_there, f"there is no {service}")
        return min(found)

    def answers(self) -> bool:
        """Whether the API does."""
        try:
            return httpx.get(f"{self.url}/live", timeout=5.0, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False


@contextmanager
def running(folder: Path, *settings: str, **endpoint: Any) -> Iterator[MockerServer]:
    """Run a server whose endpoint is ready. `endpoint`: fields of it beside the usual ones."""
    with started(folder, *settings, **endpoint) as server:
        eventually(server.serves_all, "the endpoint is not ready")
        yield server


@contextmanager
def started(folder: Path, *settings: str, **endpoint: Any) -> Iterator[MockerServer]:
    """Run a server whose API is ready."""
    args: Mapping[str, Any] = {"max-model-len": 2048, **endpoint.pop("args", {})}
    file = folder / "endpoints.yaml"
    fields = {"name": "chat", "model": "random", "engine": "mocker", "args": args, **endpoint}
    file.write_text(json.dumps({"endpoints": [fields]}))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with MockerServer(folder / "state", port, file, *settings) as server:
        server.line("API ready at")
        yield server
