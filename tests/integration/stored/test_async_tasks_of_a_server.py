"""Asynchronous tasks of a whole server with a mocker, under kills of every process."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.server_process import PATIENCE_S, eventually
from tests.integration.stored.mocker_server import running, started

pytestmark = pytest.mark.integration

SLOW = {"mocker-step-base-ms": 20}
TOKENS = 40


class Client:
    """A client of a server, at whatever address that is now."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, method: str, path: str, **more: Any) -> httpx.Response:
        return httpx.request(method, f"{self.url}/v1{path}", timeout=PATIENCE_S, trust_env=False, **more)

    def order(self, prompt: str, **more: Any) -> str:
        args = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        made = self.ask("POST", "/async-tasks?model_endpoint_id=chat", json={"args": args, **more})
        assert made.status_code == 200, made.text
        return str(made.json()["task_id"])

    def show(self, task: str) -> dict[str, Any]:
        try:
            found = self.ask("GET", f"/async-tasks/{task}")
        except httpx.HTTPError:
            return {"status": "unreachable"}
        return dict(found.json()) if found.status_code == 200 else {"status": "unreachable"}

    def ended(self, tasks: list[str]) -> list[dict[str, Any]]:
        """Wait for the end of all, whatever ends meanwhile."""
        found: list[dict[str, Any]] = []

        def have_ended() -> bool:
            found[:] = [self.show(task) for task in tasks]
            return all(each["status"] in ("SUCCESS", "FAILURE") for each in found)

        eventually(have_ended, "tasks do not end", 3 * PATIENCE_S)
        return found


def text_of(task: dict[str, Any]) -> str:
    return str(task["result"]["choices"][0]["text"])


def test_tasks_survive_kills_of_every_process(tmp_path: Path) -> None:
    """Frontend, worker and NATS are killed while tasks run, and at last the whole server: each task has the answer of
    an undisturbed server, and no journal has two results."""
    prompts = [f"count to {n}" for n in range(12)]
    with running(tmp_path, args=SLOW) as server:
        client = Client(server.url)
        undisturbed = [text_of(each) for each in client.ended([client.order(prompt) for prompt in prompts])]
        tasks: list[str] = []
        for service in ("Frontend", "VllmWorker", "Nats"):
            tasks += [client.order(prompt) for prompt in prompts[len(tasks) :][:4]]
            os.kill(server.pid_of(service), signal.SIGKILL)
            eventually(server.answers, f"no API after the death of {service}")
        listed = server.run("task", "list", "--all")
        assert {each["task_id"] for each in json.loads(listed.stdout)} >= set(tasks), listed.stderr
        late = [client.order(prompt) for prompt in prompts]
        server.signal(signal.SIGKILL)
    with started(tmp_path, args=SLOW) as server:
        client = Client(server.url)
        assert [text_of(each) for each in client.ended(tasks)] == undisturbed
        assert [text_of(each) for each in client.ended(late)] == undisturbed
        shown = json.loads(server.run("task", "show", late[0]).stdout)
        assert (shown["status"], shown["path"], shown["status_code"]) == ("SUCCESS", "/v1/completions", 200)
