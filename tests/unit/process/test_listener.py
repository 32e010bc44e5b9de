"""The API's socket, from the server to frontends: connections outlive a frontend, and strangers get nothing."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from dynamo_local.core.errors import PortInUseError, SupervisorError
from dynamo_local.process import listener as module
from dynamo_local.process.listener import ListenerHolder, bind, take_over


@asynccontextmanager
async def held() -> AsyncIterator[tuple[str, tuple[str, int]]]:
    """A holder that hands over; its name, and the address of the socket."""
    name, listener = f"test-{secrets.token_hex(8)}", bind("127.0.0.1", 0)
    address = listener.getsockname()
    holder = ListenerHolder(listener, name)
    running = asyncio.create_task(holder.run())
    try:
        yield name, address
    finally:
        running.cancel()
        await asyncio.wait({running})
        holder.close()


async def test_connections_that_come_while_no_frontend_accepts_wait_for_the_next_one() -> None:
    async with held() as (name, address):
        first = await asyncio.to_thread(take_over, name)
        first.listen()
        first.close()
        with socket.create_connection(address, 10) as client:
            client.sendall(b"hello")
            with await asyncio.to_thread(take_over, name) as second:
                second.setblocking(True)
                second.settimeout(10)
                accepted, _ = second.accept()
                with accepted:
                    assert accepted.recv(5) == b"hello"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, 10)


async def test_each_connection_is_one_frontends() -> None:
    async with held() as (name, address):
        frontends = [await asyncio.to_thread(take_over, name) for _ in range(2)]
        frontends[0].listen()
        for frontend in frontends:
            frontend.setblocking(False)
        with socket.create_connection(address, 10):
            accepted, _ = frontends[1].accept()
            accepted.close()
            with pytest.raises(BlockingIOError):
                frontends[0].accept()
        for frontend in frontends:
            frontend.close()


async def test_another_user_gets_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    async with held() as (name, _):
        monkeypatch.setattr(module, "_peer_uid", lambda connection: 4711)
        # The server's process is a stranger to the frontend as well, and found out first.
        with pytest.raises(SupervisorError, match="another user's process"):
            await asyncio.to_thread(take_over, name)
        with socket.socket(socket.AF_UNIX) as asking:
            asking.settimeout(10)
            await asyncio.to_thread(asking.connect, f"\0{name}")
            received = await asyncio.to_thread(socket.recv_fds, asking, 1, 1)
            assert received[:2] == (b"", [])
        monkeypatch.undo()
        (await asyncio.to_thread(take_over, name)).close()


def test_without_a_server_there_is_no_socket() -> None:
    with pytest.raises(SupervisorError, match="does not hand over"):
        take_over(f"test-{secrets.token_hex(8)}")


async def test_a_name_and_an_address_are_held_once() -> None:
    async with held() as (name, _):
        with bind("127.0.0.1", 0) as listener:
            with pytest.raises(SupervisorError, match="cannot be handed over"):
                ListenerHolder(listener, name)
            with socket.socket() as taken:
                taken.bind(("127.0.0.1", 0))
                taken.listen()
                with pytest.raises(PortInUseError):
                    bind(*taken.getsockname())
