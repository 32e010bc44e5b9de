"""`dynamo task` and `dynamo batch`."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dynamo_local.cli.batch_file import BatchFile
from dynamo_local.cli.jobs import task
from dynamo_local.core.async_tasks.records import TaskHead, TaskResult
from dynamo_local.core.errors import StateError, UsageError
from dynamo_local.load.client import Endpoint, parse_url
from state.async_tasks.store import TaskStore, new_task_id
from state.paths import StatePaths


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TaskStore:
    monkeypatch.setenv("DYN_LOCAL_STATE_DIR", str(tmp_path))
    return TaskStore(StatePaths(tmp_path, "n"))


def order(store: TaskStore, owner: str, at: float) -> str:
    head = TaskHead(
        task=new_task_id(at),
        model="chat",
        path="/v1/completions",
        priority=100,
        created_at=int(at),
        callback_url="http://user.example/secret?x=1",
        callback_auth="Basic c2VjcmV0",
    )
    store.create(owner, head, b'{"prompt": "private"}')
    return head.task


def run(*arguments: str) -> str:
    result = CliRunner().invoke(task, arguments, standalone_mode=False)
    assert result.exception is None, result.exception
    return result.output


def test_tasks_are_listed_and_shown_without_what_is_their_owners(store: TaskStore) -> None:
    old, new = order(store, "alice#1", 1000.0), order(store, "", 2000.0)
    listed = json.loads(run("list", "--json"))
    assert [(each["task_id"], each["owner"], each["status"]) for each in listed] == [
        (new, "-", "PENDING"),
        (old, "alice", "PENDING"),
    ]
    taken = store.take("alice#1", old)
    assert taken is not None
    taken.record(TaskResult(200, b'"private"', 1001))
    taken.end()
    assert old not in run("list")
    assert old in run("list", "--all")
    shown = run("show", old) + run("show", old, "--json") + run("list", "--all", "--json")
    assert "status 200, 9 bytes" in shown
    assert not any(secret in shown for secret in ("private", "c2VjcmV0", "x=1"))


def test_a_task_is_cancelled_by_whoever_has_it_next(store: TaskStore) -> None:
    name = order(store, "alice#1", 1000.0)
    assert run("cancel", name) == f"{name} is being cancelled\n"
    assert store.look().cancelled == {name}


def test_each_owner_has_a_secret_that_stays(store: TaskStore) -> None:
    order(store, "", 1000.0)
    mine = run("secret")
    assert mine.startswith("whsec_")
    assert run("secret") == mine
    assert json.loads(run("secret", "api-key-file", "--json"))["secret"] != mine.strip()
    result = CliRunner().invoke(task, ["secret", "nobody"], standalone_mode=False)
    assert "there is no key 'nobody'" in str(result.exception)


class Api:
    """Answers each request with its body, and notes it."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.priorities: set[bytes] = set()
        self.busy = 1
        """So many requests get 503 first."""
        self.stops_at: str | None = None
        """The prompt that is not answered until `goes` is set."""
        self.has_stopped, self.goes = asyncio.Event(), asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                headers = dict(each.split(b": ", 1) for each in head.split(b"\r\n")[1:] if b": " in each)
                body = await reader.readexactly(int(headers[b"Content-Length"]))
                self.priorities.add(headers[b"X-Vllm-Priority"])
                fields = json.loads(body)
                if fields["prompt"] == self.stops_at:
                    self.has_stopped.set()
                    await self.goes.wait()
                writer.write(self._answer(fields))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def _answer(self, fields: dict[str, Any]) -> bytes:
        status, self.busy = (503, self.busy - 1) if self.busy else (400 if fields["prompt"] == "bad" else 200, 0)
        if status != 503:
            self.asked[fields["prompt"]] += 1
        body = json.dumps(fields).encode()
        return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body


@asynccontextmanager
async def served(api: Api) -> AsyncIterator[Endpoint]:
    server = await asyncio.start_server(api.serve, "127.0.0.1", 0)
    try:
        yield parse_url(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    finally:
        server.close()


def write(path: Path, *prompts: str, **changes: Any) -> Path:
    made = [
        {"custom_id": prompt, "method": "POST", "url": "/v1/completions", "body": {"prompt": prompt}} | changes
        for prompt in prompts
    ]
    path.write_text("".join(json.dumps(each) + "\n" for each in made))
    return path


async def run_file(requests: Path, output: Path, endpoint: Endpoint) -> BatchFile:
    file = BatchFile(requests, output)
    try:
        await file.run(endpoint, 4, lambda: None)
    finally:
        file.close()
    return file


async def test_a_file_goes_on_where_it_was(tmp_path: Path) -> None:
    api, output = Api(), tmp_path / "out.jsonl"
    async with served(api) as endpoint:
        await run_file(write(tmp_path / "some.jsonl", "a", "b"), output, endpoint)
        output.write_bytes(output.read_bytes()[:-5])
        file = await run_file(write(tmp_path / "all.jsonl", "a", "b", "c", "bad"), output, endpoint)
    found = {each["custom_id"]: each["response"] for each in map(json.loads, output.read_text().splitlines())}
    assert {name: each["status_code"] for name, each in found.items()} == {"a": 200, "b": 200, "c": 200, "bad": 400}
    assert found["c"]["body"] == {"prompt": "c"}
    # The one that was cut off again, the other one not.
    assert sorted(api.asked.values()) == [1, 1, 1, 2]
    assert api.priorities == {b"1000"}
    assert (file.total, file.done, file.failed) == (4, 4, 1)
    assert file.summary(as_json=False) == "4 of 4 requests have a result, 1 of them before; 1 failed"


@pytest.mark.parametrize(
    ("prompts", "changes", "message"),
    [
        ((), {}, "has no requests"),
        (("a", "a"), {}, "line 2: custom_id is that of line 1"),
        (("a",), {"url": "/v1/models"}, "line 1: url must be one of"),
        (("a",), {"method": "GET"}, "line 1: method must be POST"),
    ],
)
def test_a_wrong_line_is_told_before_anything_is_asked(
    tmp_path: Path, prompts: tuple[str, ...], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        BatchFile(write(tmp_path / "in.jsonl", *prompts, **changes), tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_a_file_of_something_else_is_no_output(tmp_path: Path) -> None:
    requests = write(tmp_path / "in.jsonl", "a")
    with pytest.raises(StateError, match="something else"):
        BatchFile(requests, requests)
    assert requests.read_text().count("\n") == 1


async def test_ctrl_c_ends_the_command_and_the_same_command_goes_on(tmp_path: Path) -> None:
    api, output = Api(), tmp_path / "out.jsonl"
    prompts = [str(number) for number in range(30)]
    api.stops_at = "20"
    requests = write(tmp_path / "in.jsonl", *prompts)
    async with served(api) as endpoint, asyncio.timeout(120):
        command = ("-m", "dynamo_local.cli.main", "batch", "run", str(requests), "-o", str(output), "--concurrency=2")

        async def begun() -> asyncio.subprocess.Process:
            url = f"--url=http://127.0.0.1:{endpoint.port}"
            quiet = asyncio.subprocess.DEVNULL
            return await asyncio.create_subprocess_exec(sys.executable, *command, url, stdout=quiet, stderr=quiet)

        first = await begun()
        await api.has_stopped.wait()
        first.send_signal(signal.SIGINT)
        assert await first.wait() == 130
        before = len(output.read_text().splitlines())
        assert 0 < before < len(prompts)
        api.goes.set()
        again = await begun()
        assert await again.wait() == 0
    found = [json.loads(line)["custom_id"] for line in output.read_text().splitlines()]
    assert sorted(found) == sorted(prompts)
    # Those in flight at the interruption, at most, were asked twice.
    assert sum(api.asked.values()) <= len(prompts) + 2
