"""The bus between machines: TLS, and what is not said without it."""

from __future__ import annotations

import asyncio
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest

from dynamo_local.bus.address import BusAddress
from dynamo_local.bus.certificate import make_certificate
from dynamo_local.bus.nats import Bus
from dynamo_local.core.errors import BusError, BusRefusedError
from dynamo_local.supervisor.server.nats.nats_server import NatsServer
from tests.integration.nats_process import NatsProcess

pytestmark = pytest.mark.integration

HOST = "127.0.0.2"
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsProcess]:
    server = NatsProcess(tmp_path_factory.mktemp("nats"), HOST)
    server.start()
    yield server
    server.end()


async def error_of(address: BusAddress) -> BusError:
    with pytest.raises(BusError) as caught:
        await Bus.connect(address, name="test", deadline_s=DEADLINE_S)
    assert "\n" not in str(caught.value)
    return caught.value


async def echoes(bus: Bus) -> bool:
    heard, inbox = asyncio.Event(), bus.inbox()

    async def hear(message: object) -> None:
        heard.set()

    await bus.subscribe(inbox, hear)
    await bus.publish(inbox, b"said")
    async with asyncio.timeout(DEADLINE_S):
        await heard.wait()
    return True


async def test_who_knows_authority_and_token_is_connected(nats: NatsProcess) -> None:
    bus = await Bus.connect(nats.address, name="test", deadline_s=DEADLINE_S)
    try:
        assert await echoes(bus)
        # No other machine comes by loopback.
        assert not bus.secure_host
    finally:
        await bus.close()


async def test_a_wrong_token_is_refused(nats: NatsProcess) -> None:
    assert isinstance(await error_of(msgspec.structs.replace(nats.address, token="wrong")), BusRefusedError)


async def test_a_server_of_another_authority_is_not_spoken_to(nats: NatsProcess) -> None:
    other = make_certificate(HOST).authority
    error = await error_of(msgspec.structs.replace(nats.address, ca=other))
    assert "is not valid" in error.cause
    assert "--nats-ca" in str(error.remedy)


async def test_an_authority_that_nobody_gives_is_named_as_the_cause(nats: NatsProcess) -> None:
    error = await error_of(msgspec.structs.replace(nats.address, ca=None))
    assert "is not valid" in error.cause
    assert "--nats-ca" in str(error.remedy)


async def test_a_certificate_for_another_address_is_not_valid(tmp_path: Path) -> None:
    """The server listens on 127.0.0.2, and its certificate is for 192.0.2.1."""
    settings = NatsServer.at(tmp_path, "192.0.2.1")
    server = NatsProcess(tmp_path, HOST)
    server.change(replace(server.settings, certificate=settings.certificate))
    server.start()
    try:
        error = await error_of(server.address)
    finally:
        server.end()
    assert "127.0.0.2" in error.cause


async def test_a_server_without_tls_gets_no_token(own_nats: NatsProcess) -> None:
    authority = make_certificate(HOST).authority
    plain = own_nats.address
    error = await error_of(BusAddress(plain.url.replace("nats://", "tls://"), plain.token, plain.user, authority))
    assert "does not speak TLS" in error.cause


INFO = b'INFO {"server_id":"x","version":"2.15.1","proto":1,"max_payload":1048576%s}\r\n'


@asynccontextmanager
async def serving(serve: Callable[[StreamReader, StreamWriter], Awaitable[None]]) -> AsyncIterator[int]:
    server = await asyncio.start_server(serve, HOST)
    async with server:
        yield server.sockets[0].getsockname()[1]


@asynccontextmanager
async def impostor(received: bytearray) -> AsyncIterator[int]:
    """Greets like NATS, without a word of TLS, and keeps what it is told."""

    async def serve(reader: StreamReader, writer: StreamWriter) -> None:
        writer.write(INFO % b"")
        while data := await reader.read(4096):
            received.extend(data)
            if b"PING" in data:
                writer.write(b"PONG\r\n")
        writer.close()

    async with serving(serve) as port:
        yield port


async def test_who_takes_tls_out_of_the_greeting_learns_no_token(nats: NatsProcess) -> None:
    received = bytearray()
    async with impostor(received) as port:
        address = msgspec.structs.replace(nats.address, url=f"tls://{HOST}:{port}")
        with pytest.raises(BusError):
            await Bus.connect(address, name="test", deadline_s=1.0)
    assert received
    assert address.token is not None
    assert address.token.encode() not in received
    assert b"CONNECT" not in received


@asynccontextmanager
async def between(nats: NatsProcess, greeting: bytes) -> AsyncIterator[int]:
    """Greets in the server's place, and passes on all that follows."""

    async def serve(reader: StreamReader, writer: StreamWriter) -> None:
        there, to = await asyncio.open_connection(HOST, urlsplit(nats.address.url).port)
        await there.readline()
        writer.write(greeting)
        await asyncio.gather(copy(reader, to), copy(there, writer))

    async def copy(reader: StreamReader, writer: StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(4096):
                writer.write(data)
        writer.close()

    async with serving(serve) as port:
        yield port


async def test_nothing_that_was_said_before_tls_is_heard_after_it(nats: NatsProcess) -> None:
    async with between(nats, INFO % b"" + b"PONG\r\nMSG x 1 5\r\nlying\r\n") as port:
        address = msgspec.structs.replace(nats.address, url=f"tls://{HOST}:{port}")
        with pytest.raises(BusError, match="before TLS"):
            await Bus.connect(address, name="test", deadline_s=1.0)


async def test_servers_that_are_named_before_tls_are_not_asked(nats: NatsProcess) -> None:
    asked = asyncio.Event()

    async def note(reader: StreamReader, writer: StreamWriter) -> None:
        asked.set()
        writer.close()

    async with (
        serving(note) as other,
        between(nats, INFO % (b',"connect_urls":["%s:%d"]' % (HOST.encode(), other))) as port,
    ):
        bus = await Bus.connect(
            msgspec.structs.replace(nats.address, url=f"tls://{HOST}:{port}"), name="test", deadline_s=DEADLINE_S
        )
        try:
            assert await echoes(bus)
            assert str(other) not in str(bus._client.servers)
        finally:
            await bus.close()
    assert not asked.is_set()


async def test_address_and_certificate_outlive_a_restart(tmp_path: Path) -> None:
    server = NatsProcess(tmp_path, HOST)
    server.start()
    try:
        bus = await Bus.connect(server.address, name="test", deadline_s=DEADLINE_S)
        before = server.address
        server.kill()
        server.start()
        assert server.address == before
        async with asyncio.timeout(DEADLINE_S):
            while not bus.connections:  # noqa: ASYNC110  # what is waited for has no event
                await asyncio.sleep(0.02)
        assert await echoes(bus)
        await bus.close()
    finally:
        server.end()
