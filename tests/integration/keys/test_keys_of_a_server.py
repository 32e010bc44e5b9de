"""API keys of a whole server with a mocker: by command, by REST, and as OpenAI's client meets them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.integration.server_process import PATIENCE_S, READY_WITHIN_S, ServerProcess, eventually

pytestmark = pytest.mark.integration

COMMAND = ["-m", "dynamo_local.cli.main"]


class KeyServer(ServerProcess):
    """`dynamo serve` of one endpoint with a mocker."""

    def __init__(self, root: Path, port: int, file: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        super().__init__(
            root, "keys", [*COMMAND, "serve", "-f", str(file), f"--port={port}", "--namespace=keys", "--cpu-slots=1"]
        )

    def command(self, *arguments: str) -> Any:
        """What a command prints as JSON."""
        done = self.run(*arguments)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *COMMAND, *arguments, "--json", "--namespace=keys"]
        return subprocess.run(
            command, env=dict(self.environ), capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )

    def client(self, key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE_S)

    def rest(self, key: str) -> httpx.Client:
        return httpx.Client(
            base_url=self.url, headers={"authorization": f"Bearer {key}"}, timeout=PATIENCE_S, trust_env=False
        )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeyServer]:
    folder = tmp_path_factory.mktemp("keys")
    file = folder / "endpoints.yaml"
    endpoint = {"name": "chat", "model": "random", "engine": "mocker", "args": {"max-model-len": 2048}}
    file.write_text(json.dumps({"endpoints": [endpoint]}))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with KeyServer(folder / "state", port, file) as server:
        server.line("API ready at", within_s=READY_WITHIN_S)
        eventually(server.serves_all, "the endpoint is not ready")
        yield server


def ask(client: openai.OpenAI, **extra: Any) -> str:
    return client.completions.create(model="chat", prompt="hello", max_tokens=5, extra_body=extra).choices[0].text


def test_a_life_of_keys(server: KeyServer) -> None:
    # Without a key everybody is answered.
    assert ask(server.client("none"))
    boss = server.command("key", "create", "boss", "--admin")["secret"]
    with pytest.raises(openai.AuthenticationError):
        ask(server.client("none"))

    # By REST, for administrators alone.
    with server.rest(boss) as rest:
        made = rest.post("/v1/keys", json={"name": "alice", "requests_per_minute": 3, "best_priority": 2})
        assert made.status_code == 201
        alice = made.json()["secret"]
        assert [key["name"] for key in rest.get("/v1/keys").json()["data"]] == ["boss", "alice"]
        assert rest.post("/v1/keys", json={"name": "alice"}).status_code == 409
        assert rest.post("/v1/keys", json={"name": "other", "endpoints": ["code"]}).status_code == 201
        other = rest.post("/v1/keys/other/rotate", json={"overlap_s": 0}).json()["secret"]
        with server.rest(alice) as plain:
            assert plain.get("/v1/keys").status_code == 403

    # As OpenAI's client meets refusals.
    client = server.client(alice)
    answered = client.completions.with_raw_response.create(model="chat", prompt="hello", max_tokens=5)
    assert answered.headers["x-ratelimit-remaining-requests"] == "2"
    with pytest.raises(openai.PermissionDeniedError, match="may have priority 2 at best"):
        ask(client, priority=1)
    assert ask(client)
    with pytest.raises(openai.RateLimitError) as limited:
        ask(client)
    assert (limited.value.code, limited.value.type) == ("rate_limit_exceeded", "requests")
    assert int(limited.value.response.headers["retry-after"]) > 0
    with pytest.raises(openai.NotFoundError, match="`chat` does not exist"):
        ask(server.client(other))
    assert server.client(other).models.list().data == []

    # Limits outlive a frontend that is killed.
    pid = server.pid("Frontend")
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: frontend_of(server) not in (None, pid) and answers(server), "there is no other frontend")
    with pytest.raises(openai.RateLimitError):
        ask(client)

    # A revoked key is unknown at once; what was ordered is in the log, by whom, and without secrets.
    assert server.command("key", "revoke", "alice") == {"revoked": True}
    with pytest.raises(openai.AuthenticationError):
        ask(client)
    events = server.paths.events_file.read_text()
    assert "key alice created" in events
    assert "by key boss" in events
    everything = [path for path in server.paths.root.rglob("*") if path.is_file()]
    for secret in (boss, alice, other):
        assert not [path for path in everything if secret.encode() in path.read_bytes()]


def test_tokens_a_minute(server: KeyServer) -> None:
    secret = server.command("key", "create", "tokens", "--tokens-per-minute", "100")["secret"]
    with server.rest(secret) as rest:
        asked = {"model": "chat", "prompt": list(range(10, 30)), "max_tokens": 60, "stop_token_ids": []}
        first = rest.post("/v1/completions", json=asked | {"max_tokens": 30, "ignore_eos": True})
        assert first.status_code == 200, first.text
        assert first.headers["x-ratelimit-limit-tokens"] == "100"
        used = first.json()["usage"]["total_tokens"]
        assert used == 50
        too_many = rest.post("/v1/completions", json=asked | {"stream": True})
        assert too_many.status_code == 429
        error = too_many.json()["error"]
        assert (error["type"], error["code"]) == ("tokens", "rate_limit_exceeded")
        never = rest.post("/v1/completions", json=asked | {"max_tokens": 90})
        assert (never.status_code, never.headers["x-should-retry"]) == (429, "false")


def frontend_of(server: KeyServer) -> int | None:
    """Pid of the frontend; None while there is none."""
    return server.state().components["keys_Frontend"].pid


def answers(server: KeyServer) -> bool:
    try:
        return httpx.get(f"{server.url}/health", trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False
