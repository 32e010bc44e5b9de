"""Asynchronous tasks of a whole server with a mocker, under kills of its frontend and of the server."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from dynamo_local.control.client import ControlClient
from dynamo_local.control.operations import LIST_JOBS
from tests.integration.server_process import PATIENCE_S, eventually
from tests.integration.stored.mocker_server import running, started

pytestmark = pytest.mark.integration

ALLOW = ("--Frontend.callback-allow=127.0.0.1/32",)
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


class Receiver:
    """Receives callbacks, and refuses them until `takes` is set. `told`: what it has taken, by task."""

    def __init__(self) -> None:
        self.takes = False
        self.told: dict[str, dict[str, Any]] = {}
        self.last: tuple[bytes, dict[str, str]] = b"", {}
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver.take(self)

            def log_message(self, *_: object) -> None:
                """Quiet: a test's output is its own."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/"

    def take(self, asked: BaseHTTPRequestHandler) -> None:
        body = asked.rfile.read(int(asked.headers["content-length"]))
        if self.takes:
            data = json.loads(body)["data"]
            assert self.told.setdefault(data["task_id"], data) == data
            self.last = body, dict(asked.headers.items())
        asked.send_response(200 if self.takes else 503)
        asked.end_headers()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


def text_of(task: dict[str, Any]) -> str:
    return str(task["result"]["choices"][0]["text"])


def test_tasks_survive_kills(tmp_path: Path, receiver: Receiver) -> None:
    """The frontend is killed while tasks run, and then the whole server: each task has the answer of
    an undisturbed server, its receiver is called although it fails at first, and nobody gets two results."""
    prompts = [f"count to {n}" for n in range(12)]
    with running(tmp_path, *ALLOW, args=SLOW) as server:
        client = Client(server.url)
        undisturbed = [text_of(each) for each in client.ended([client.order(prompt) for prompt in prompts])]
        tasks = [client.order(prompt, callback_url=receiver.url) for prompt in prompts]
        os.kill(server.pid_of("Frontend"), signal.SIGKILL)
        eventually(server.answers, "no API after the death of the frontend")
        listed = server.run("task", "list", "--all")
        assert {each["task_id"] for each in json.loads(listed.stdout)} >= set(tasks), listed.stderr
        assert {each["task_id"] for each in ControlClient(server.paths).do(LIST_JOBS)["data"]} <= set(tasks)
        late = [client.order(prompt, callback_url=receiver.url) for prompt in prompts]
        server.signal(signal.SIGKILL)
    receiver.takes = True
    with started(tmp_path, *ALLOW, args=SLOW) as server:
        client = Client(server.url)
        assert [text_of(each) for each in client.ended(tasks)] == undisturbed
        assert [text_of(each) for each in client.ended(late)] == undisturbed
        shown = json.loads(server.run("task", "show", late[0]).stdout)
        assert (shown["status"], shown["path"], shown["status_code"]) == ("SUCCESS", "/v1/completions", 200)
        eventually(lambda: receiver.told.keys() >= {*tasks, *late}, "receivers are not called", 3 * PATIENCE_S)
        assert [text_of(receiver.told[task]) for task in late] == undisturbed
        secret = json.loads(server.run("task", "secret").stdout)["secret"]
        body, headers = receiver.last
        openai.OpenAI(api_key="none").webhooks.verify_signature(body, headers, secret=secret)
