"""Batches of a whole server with a mocker, as OpenAI's client has them, under kills of every process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch

from tests.integration.server_process import PATIENCE_S, eventually
from tests.integration.stored.mocker_server import COMMAND, NAMESPACE, MockerServer, running, started

pytestmark = pytest.mark.integration

ENDED = ("completed", "failed", "expired", "cancelled")
LINES = 150
SLOW = {"mocker-step-base-ms": 4}


def lines(number: int, url: str = "/v1/chat/completions") -> bytes:
    made = []
    for n in range(number):
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": f"count to {n}"}]}
        if url == "/v1/completions":
            asked = {"prompt": f"count to {n}"}
        elif url == "/v1/responses":
            asked = {"input": f"count to {n}"}
        most = "max_output_tokens" if url == "/v1/responses" else "max_tokens"
        body = {"model": "chat", **asked, most: 5 + n % 5, "temperature": 0}
        made.append({"custom_id": f"line {n}", "method": "POST", "url": url, "body": body})
    return b"".join(json.dumps(line).encode() + b"\n" for line in made)


def order(client: openai.OpenAI, content: bytes, endpoint: Any = "/v1/chat/completions") -> Batch:
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")


def wait(client: openai.OpenAI, batch_id: str) -> Batch:
    """Wait for the end of a batch, whatever ends meanwhile."""
    found: list[Batch] = []

    def has_ended() -> bool:
        try:
            found[:] = [client.batches.retrieve(batch_id)]
        except openai.APIError:
            return False
        return found[0].status in ENDED

    eventually(has_ended, f"{batch_id} does not end", 3 * PATIENCE_S)
    return found[0]


def results(client: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    assert file_id is not None
    # Not splitlines(): JSON may have other ends of lines in its texts, such as U+2028.
    found = [json.loads(line) for line in client.files.content(file_id).text.split("\n") if line]
    assert len({line["custom_id"] for line in found}) == len(found)
    return {line["custom_id"]: line["response"]["body"] for line in found}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MockerServer]:
    """With two frontends: whichever is asked, one of them runs the batch."""
    two = "--Frontend.ServiceArgs.workers=2"
    with running(tmp_path_factory.mktemp("batches"), two, args=SLOW) as server:
        yield server


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_a_life_of_a_batch(server: MockerServer, endpoint: str) -> None:
    client = server.client()
    batch = wait(client, order(client, lines(10, endpoint), endpoint).id)
    assert (batch.status, batch.error_file_id, batch.errors) == ("completed", None, None)
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 10, "completed": 10, "failed": 0}
    found = results(client, batch.output_file_id)
    assert found.keys() == {f"line {n}" for n in range(10)}
    told = [Counter(found[name]["usage"]) for name in found]
    assert batch.usage is not None
    assert batch.usage.total_tokens == sum(each["total_tokens"] for each in told) > 0
    assert client.files.retrieve(str(batch.output_file_id)).purpose == "batch_output"
    shown, cancelled = (json.loads(server.run("batch", what, batch.id).stdout) for what in ("show", "cancel"))
    assert shown == cancelled == {**shown, **batch.model_dump(exclude_unset=True), "owner": "-"}
    assert shown in json.loads(server.run("batch", "list").stdout)


def test_a_file_is_run_by_command_and_goes_on_after_ctrl_c(server: MockerServer, tmp_path: Path) -> None:
    requests, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests.write_bytes(lines(LINES))

    def begun() -> subprocess.Popen[bytes]:
        command = ["batch", "run", str(requests), "-o", str(output), "--concurrency=4", f"--namespace={NAMESPACE}"]
        return subprocess.Popen([sys.executable, *COMMAND, *command], env=dict(server.environ))

    def results_there() -> int:
        return output.read_bytes().count(b"\n") if output.exists() else 0

    with begun() as first:
        eventually(lambda: results_there() > 5, "there are no results")
        first.send_signal(signal.SIGINT)
        assert first.wait(PATIENCE_S) == 130
    assert results_there() < LINES
    with begun() as again:
        assert again.wait(PATIENCE_S) == 0
    found = [json.loads(line) for line in output.read_bytes().splitlines()]
    assert sorted(each["custom_id"] for each in found) == sorted(f"line {n}" for n in range(LINES))
    tokens = {each["custom_id"]: each["response"]["body"]["usage"]["completion_tokens"] for each in found}
    assert tokens == {f"line {n}": 5 + n % 5 for n in range(LINES)}


def test_a_wrong_line_is_told(server: MockerServer) -> None:
    client = server.client()
    wrong = lines(6) + lines(1).replace(b'"chat"', b'"nobody"')
    batch = wait(client, order(client, wrong).id)
    assert batch.status == "failed"
    assert batch.errors is not None
    told = {(error.line, error.code, error.param) for error in batch.errors.data or ()}
    assert told == {(7, "duplicate_custom_id", "custom_id")}
    with pytest.raises(openai.BadRequestError, match="no such file"):
        client.batches.create(input_file_id="file-0", endpoint="/v1/responses", completion_window="24h")


def test_batches_by_the_asynchronous_client(server: MockerServer) -> None:
    async def use() -> tuple[Batch, list[str]]:
        async with server.async_client() as client:
            file = await client.files.create(file=("in.jsonl", lines(2000)), purpose="batch")
            made = await client.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
            )
            await client.batches.cancel(made.id)
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    batch = await client.batches.retrieve(made.id)
                    if batch.status in ENDED:
                        break
                    await asyncio.sleep(0.1)
            return batch, [each.id async for each in client.batches.list(limit=1)]

    batch, listed = asyncio.run(use())
    assert batch.status == "cancelled"
    assert batch.id in listed


def test_each_line_has_one_result_whatever_is_killed(tmp_path: Path) -> None:
    """Frontend, worker and NATS are killed while a batch runs, and at last the whole server."""
    with running(tmp_path, args={**SLOW, "mocker-step-base-ms": 40}) as server:
        client = server.client()
        batch_id = order(client, lines(LINES)).id

        def completed() -> int:
            try:
                counts = client.batches.retrieve(batch_id).request_counts
            except openai.APIError:
                return 0
            return 0 if counts is None else counts.completed

        reached = 0
        for victim in ("Frontend", "VllmWorker", "Nats"):
            eventually(lambda reached=reached: completed() > reached, "the batch does not go on")  # type: ignore[misc]
            reached = completed()
            os.kill(server.pid_of(victim), signal.SIGKILL)
        eventually(lambda: completed() > reached, "the batch does not go on")
        assert completed() < LINES
        server.signal(signal.SIGKILL)
    with started(tmp_path, args=SLOW) as server:
        client = server.client()
        batch = wait(client, batch_id)
        found = results(client, batch.output_file_id)
    assert (batch.status, batch.error_file_id) == ("completed", None)
    assert found.keys() == {f"line {n}" for n in range(LINES)}
    # As undisturbed: a mocker's tokens are a function of the context.
    assert [found[f"line {n}"]["usage"]["completion_tokens"] for n in range(LINES)] == [5 + n % 5 for n in range(LINES)]
