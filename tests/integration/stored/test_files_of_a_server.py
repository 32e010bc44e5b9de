"""Files of a whole server with a mocker, as OpenAI's client has them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.integration.server_process import eventually
from tests.integration.stored.mocker_server import MockerServer, running

pytestmark = pytest.mark.integration

LINES = b"".join(json.dumps({"custom_id": str(number)}).encode() + b"\n" for number in range(100_000))
"""Larger than a request's body may be by default, and than what is written at once."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MockerServer]:
    with running(tmp_path_factory.mktemp("files")) as server:
        yield server


def test_a_life_of_files(server: MockerServer) -> None:
    client = server.client()
    stored = client.files.create(file=("in.jsonl", LINES), purpose="batch")
    assert (stored.bytes, stored.filename, stored.purpose, stored.status) == (
        len(LINES),
        "in.jsonl",
        "batch",
        "processed",
    )
    assert client.files.content(stored.id).content == LINES
    expires = client.files.create(
        file=b"short", purpose="user_data", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert expires.expires_at == expires.created_at + 3600
    assert [file.id for file in client.files.list(purpose="batch")] == [stored.id]
    # Pages of one, followed by the client itself.
    assert {file.id for file in client.files.list(limit=1)} == {stored.id, expires.id}

    pid = server.pid("Frontend")
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: server.frontend_pid() not in (None, pid) and server.answers(), "there is no other frontend")
    assert client.files.retrieve(stored.id) == stored

    with pytest.raises(openai.BadRequestError, match="purpose must be one of"):
        client.files.create(file=b"1", purpose="vision")
    assert client.files.delete(expires.id).deleted
    with pytest.raises(openai.NotFoundError, match="no such file"):
        client.files.retrieve(expires.id)


def test_files_by_the_asynchronous_client(server: MockerServer, tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_bytes(LINES)

    async def use() -> bytes:
        async with server.async_client() as client:
            stored = await asyncio.gather(*(client.files.create(file=path, purpose="batch") for _ in range(3)))
            content = await client.files.content(stored[1].id)
            assert {file.id for file in stored} <= {file.id async for file in client.files.list()}
            await asyncio.gather(*(client.files.delete(file.id) for file in stored))
            return content.content

    assert asyncio.run(use()) == LINES
