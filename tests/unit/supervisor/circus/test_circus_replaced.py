"""A command that was sent to a circusd that is killed is sent to the next one, which listens in the same place."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from dynamo_local.supervisor.circus.client import CircusClient


async def next_command(endpoint: str, context: zmq.asyncio.Context, *, answers: bool) -> None:
    """Be a circusd until the next command."""
    socket = context.socket(zmq.ROUTER)
    socket.bind(endpoint)
    try:
        sender, *_, message = await socket.recv_multipart()
        call: dict[str, Any] = msgspec.json.decode(message)
        if answers:
            reply = {"id": call["id"], "status": "ok", "time": 0.0, "statuses": {"one": "active"}}
            await socket.send_multipart([sender, msgspec.json.encode(reply)])
    finally:
        socket.close(linger=-1 if answers else 0)


def test_what_a_killed_circusd_did_not_answer_is_asked_again(tmp_path: Path) -> None:
    async def run() -> dict[str, str]:
        endpoint = f"ipc://{tmp_path}/circus.sock"
        with zmq.asyncio.Context() as context:
            async with asyncio.timeout(60), CircusClient(endpoint, deadline_s=30) as client:
                killed = asyncio.create_task(next_command(endpoint, context, answers=False))
                asking = asyncio.create_task(client.statuses())
                await killed
                # The file system may give the next socket the inode of this one.
                await next_command(endpoint, context, answers=True)
                return await asking

    assert asyncio.run(run()) == {"one": "active"}
