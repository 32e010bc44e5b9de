"""uvicorn, with fewer ticks: it still answers, tells the time of now, and ends when it is told to."""

from __future__ import annotations

import asyncio
import socket
from email.utils import parsedate_to_datetime
from typing import Any

import pytest

from dynamo_local.engine.vllm.patches.http_ticks import UvicornStop

uvicorn = pytest.importorskip("uvicorn", reason="uvicorn comes with vLLM")


async def application(scope: dict[str, Any], receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})


async def date_of_answer(port: int) -> float:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert b"hello" in body
    date = next(line for line in head.decode().splitlines() if line.lower().startswith("date:"))
    return parsedate_to_datetime(date.partition(":")[2].strip()).timestamp()


async def test_a_server_answers_with_the_time_and_ends_when_told_to() -> None:
    server = uvicorn.Server(uvicorn.Config(application, log_level="warning", lifespan="off"))
    stop, ticks = UvicornStop(server), 0
    tick = server.on_tick

    async def count(counter: int) -> bool:
        nonlocal ticks
        ticks += 1
        return bool(await tick(counter))

    server.on_tick = count
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        port = listener.getsockname()[1]
        begun = asyncio.get_running_loop().time()
        async with asyncio.timeout(60):
            first = await date_of_answer(port)
            while await date_of_answer(port) == first:  # noqa: ASYNC110  # it tells nobody
                await asyncio.sleep(0.1)
        assert ticks <= 2 + asyncio.get_running_loop().time() - begun
        stop.stop()
        await asyncio.wait_for(serving, 60)
