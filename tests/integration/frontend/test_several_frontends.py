"""Two frontends on one port, with two routers: any of them speaks for all, and the death of one costs its own requests
alone."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from dynamo_local.control.client import ControlClient
from dynamo_local.control.operations import LIST_EVENTS
from dynamo_local.core.fleet.view import FRONTEND_ROLE
from tests.integration.server_process import PATIENCE_S, READY_WITHIN_S, ServerProcess, eventually

pytestmark = pytest.mark.integration

COMMAND = ["-m", "dynamo_local.cli.main"]
STREAMS = 8
MOST_REQUESTS = 16
SLOW = {"mocker-step-base-ms": 20.0, "max-model-len": 2048}
ENDLESS, ENDLESS_TOKENS = SLOW | {"mocker-step-base-ms": 200.0, "max-requests": MOST_REQUESTS}, 2_000
"""An answer takes longer than anything is waited for."""


class Frontends(ServerProcess):
    """`dynamo serve` of two endpoints with mockers, two frontends and two routers."""

    def __init__(self, root: Path, port: int, file: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        options = ["--frontends=2", "--Router.ServiceArgs.workers=2", "--cpu-slots=4"]
        super().__init__(
            root, "many", [*COMMAND, "serve", "-f", str(file), f"--port={port}", "--namespace=many", *options]
        )

    def command(self, *arguments: str) -> Any:
        """What a command prints as JSON."""
        command = [sys.executable, *COMMAND, *arguments, "--json", "--namespace=many"]
        done = subprocess.run(
            command, env=dict(self.environ), capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def frontends(self) -> dict[str, int]:
        """Pids by watcher, of those that are ready."""
        rows = self.command("ps")
        return {row["watcher"]: row["pid"] for row in rows if row["role"] == FRONTEND_ROLE and row["state"] == "ready"}

    def requests(self) -> list[dict[str, Any]]:
        return list(self.command("requests")["requests"])

    def told(self, what: str) -> set[str]:
        """Ids of the requests to which that has happened, as the control API tells."""
        events = ControlClient(self.paths).do(LIST_EVENTS, query={"kind": "request"})["data"]
        return {event["request"] for event in events if event["what"] == what}

    def get(self, path: str) -> str:
        """The answer on a connection of its own, which either frontend may take."""
        return httpx.get(f"{self.url}{path}", timeout=PATIENCE_S, trust_env=False).raise_for_status().text

    def metrics(self) -> dict[str, float]:
        """The sum of each metric's series."""
        found: Counter[str] = Counter()
        for family in text_string_to_metric_families(self.get("/metrics")):
            for sample in family.samples:
                found[sample.name] += sample.value  # type: ignore[assignment]
        return dict(found)

    def shows_all_streams(self) -> bool:
        shown = self.metrics()
        names = ("dynamo_frontends", "dynamo_frontends_unread", "dynamo_frontend_requests_in_flight")
        return [shown[name] for name in names] == [2, 0, STREAMS]


class Stream:
    """A stream of one client, on a connection of its own."""

    def __init__(self, url: str, number: int, tokens: int, model: str = "chat", key: str = "none") -> None:
        self.prompt = f"stream {number}"
        self.body = {"model": model, "prompt": self.prompt, "max_tokens": tokens, "temperature": 0}
        self.status = 0
        self.id = ""
        self.text = ""
        self.ended = False
        self.began = threading.Event()
        self.stopped = threading.Event()
        self._url = url
        self._headers = {"authorization": f"Bearer {key}"}

    def run(self) -> None:
        """Read it to its end, or until it is stopped."""
        body = {**self.body, "stream": True}
        try:
            with httpx.stream(
                "POST", self._url, json=body, headers=self._headers, timeout=PATIENCE_S, trust_env=False
            ) as answer:
                self.status = answer.status_code
                if self.status != 200:
                    self.began.set()
                    # Its connection counts where it was accepted, so that the next one is accepted elsewhere.
                    self.stopped.wait(PATIENCE_S)
                    return
                for line in answer.iter_lines():
                    self._take(line.removeprefix("data: "))
                    if self.stopped.is_set():
                        return
        except httpx.HTTPError:
            pass
        finally:
            self.began.set()

    def _take(self, data: str) -> None:
        if data == "[DONE]":
            self.ended = True
        elif data:
            event = json.loads(data)
            self.id, self.text = event["id"], self.text + event["choices"][0]["text"]
            self.began.set()

    def whole(self) -> str:
        """The answer to the same request, undisturbed."""
        answer = httpx.post(self._url, json=self.body, timeout=PATIENCE_S, trust_env=False).raise_for_status()
        return str(answer.json()["choices"][0]["text"])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontends]:
    folder = tmp_path_factory.mktemp("many")
    file = folder / "endpoints.yaml"
    endpoint = {"name": "chat", "model": "random", "engine": "mocker", "min_workers": 2, "args": SLOW}
    endless = endpoint | {"name": "endless", "min_workers": 1, "args": ENDLESS}
    file.write_text(json.dumps({"endpoints": [endpoint, endless]}))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with Frontends(folder / "state", port, file) as server:
        server.line("API ready at", within_s=READY_WITHIN_S)
        eventually(server.serves_all, "an endpoint is not ready")
        eventually(lambda: len(server.frontends()) == 2, "a frontend is not ready")
        yield server


def streams_of_both(server: Frontends, pool: ThreadPoolExecutor) -> tuple[list[Stream], dict[str, str]]:
    """Streams under way, and which frontend has each, by the id that its client knows. Each frontend has one."""
    streams = [Stream(f"{server.url}/v1/completions", number, 600) for number in range(STREAMS)]
    for stream in streams:
        pool.submit(stream.run)
    for stream in streams:
        assert stream.began.wait(PATIENCE_S)
    owners = {row["request"]: row["frontend"] for row in server.requests()}
    assert {stream.id for stream in streams} <= set(owners)
    return streams, owners


def test_any_speaks_for_all_and_one_that_is_killed_costs_its_own_requests(server: Frontends) -> None:
    before = server.metrics()
    with ThreadPoolExecutor(STREAMS) as pool:
        streams, owners = streams_of_both(server, pool)
        for _ in range(3):
            assert json.loads(server.get("/load")) == {"server_load": STREAMS}
        eventually(server.shows_all_streams, "the requests of all frontends are not shown")
        eventually(lambda: set(owners) <= server.told("first token"), "requests of a frontend are not told")
        # The one that has the fewer is killed: the others are many.
        victim, has = min(
            Counter(dict.fromkeys(server.frontends(), 0) | Counter(owners.values())).items(),
            key=lambda each: each[1],
        )
        os.kill(server.frontends()[victim], signal.SIGKILL)
        # A connection that comes now is served at once: nobody needs to be started first.
        assert json.loads(server.get("/load"))["server_load"] <= STREAMS
        pool.shutdown()
    lost = [stream for stream in streams if not stream.ended]
    assert {owners[stream.id] for stream in lost} <= {victim}
    assert len(lost) == has
    finished = [stream for stream in streams if stream.ended]
    eventually(lambda: {stream.id for stream in finished} <= server.told("ended"), "the end of a request is not told")
    with ThreadPoolExecutor(STREAMS) as pool:
        assert [stream.text for stream in finished] == list(pool.map(Stream.whole, finished))
    after = server.metrics()
    success = "vllm:request_success_total"
    assert after[success] - before.get(success, 0) >= 2 * len(finished)
    eventually(lambda: len(server.frontends()) == 2, "the frontend is not started again")
    assert json.loads(server.get("/load")) == {"server_load": 0}
    assert server.metrics()[success] >= after[success], "what the dead one had counted stays"


def asked(server: Frontends, pool: ThreadPoolExecutor, key: str, number: int) -> list[Stream]:
    """Streams that do not end by themselves, of which each has been begun or refused."""
    url = f"{server.url}/v1/completions"
    streams = [Stream(url, index, ENDLESS_TOKENS, "endless", key) for index in range(number)]
    for stream in streams:
        pool.submit(stream.run)
    for stream in streams:
        assert stream.began.wait(PATIENCE_S)
    return streams


def test_limits_and_shares_of_keys_hold_for_both_together(server: Frontends) -> None:
    boss = server.command("key", "create", "boss", "--admin")["secret"]
    streams: list[Stream] = []
    rest = httpx.Client(
        base_url=server.url, headers={"authorization": f"Bearer {boss}"}, timeout=PATIENCE_S, trust_env=False
    )

    def begun(key: dict[str, Any], number: int) -> list[str]:
        """Ids of those that are answered, of so many requests at the same time; the others are refused."""
        secret = rest.post("/v1/keys", json=key).raise_for_status().json()["secret"]
        mine = asked(server, pool, secret, number)
        streams.extend(mine)
        assert {stream.status for stream in mine} <= {200, 429}
        return [stream.id for stream in mine if stream.status == 200]

    # Each request has a connection of its own, of which each frontend accepts its part: both are asked.
    with ThreadPoolExecutor(100) as pool, rest:
        try:
            # Alone, a key gets all that there is; then another one gets its share of that: neither more nor less.
            flood = begun({"name": "flood"}, MOST_REQUESTS + 8)
            assert len(flood) == MOST_REQUESTS
            few = begun({"name": "few", "requests_at_once": 3}, 8)
            assert len(few) == 3
            second = begun({"name": "second"}, MOST_REQUESTS)
            assert len(second) == MOST_REQUESTS // 3
            owners = {row["request"]: row["frontend"] for row in server.requests()}
            assert {owners[each] for each in flood + few + second} == set(server.frontends())
        finally:
            for stream in streams:
                stream.stopped.set()
            for key in ("flood", "few", "second"):
                rest.delete(f"/v1/keys/{key}")
            server.command("key", "revoke", "boss", "--open")
    eventually(lambda: json.loads(server.get("/load")) == {"server_load": 0}, "what has ended is still counted")


def test_an_update_waits_for_all_frontends(server: Frontends) -> None:
    """Otherwise one of them would go on asking the revision that ends."""
    answers: list[int] = []
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            body = {"model": "chat", "prompt": "x", "max_tokens": 1}
            answers.append(
                httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S, trust_env=False).status_code
            )

    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            pool.submit(ask)
        try:
            server.command("endpoint", "update", "chat", "--arg", "max-model-len=1024")
            after = len(answers)
            eventually(lambda: len(answers) >= after + 10, "nobody is answered")
        finally:
            done.set()
    assert set(answers) == {200}
