"""Connections that several processes accept from one socket: each gets its part, and none waits for one that hangs."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from components.frontend.limits.places import Places
from components.frontend.limits.rooms import Rooms
from dynamo_local.bus.certificate import Certificate, make_certificate

pytest.importorskip("uvicorn", reason="uvicorn comes with vLLM")

PATIENCE_S = 60.0


class Process(asyncio.Protocol):
    """What one process knows of its connections. Says its name to each."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.connections = 0
        self.places = Places(path)
        self.rooms = Rooms(self.places)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.connections += 1
        self.rooms.note_connections(self.connections)
        transport.write(self.name.encode())

    def end(self) -> None:
        self.rooms.close()
        self.places.close()


def _itself(process: Process) -> Process:
    return process


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[str], Process]]:
    with ExitStack() as made:

        def one(name: str) -> Process:
            process = Process(name, tmp_path / "run" / "limits")
            made.callback(process.end)
            return process

        yield one


@asynccontextmanager
async def accepting(*processes: Process) -> AsyncIterator[Callable[[int], asyncio.Future[list[str]]]]:
    """Have the processes accept from one socket. Gives what connects so many clients at the same time, and returns
    whose connections they are."""
    from dynamo_local.engine.vllm.frontend.http_connections import Acceptor

    with ExitStack() as open_ones, socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        acceptors = [Acceptor(listener.dup(), partial(_itself, it), lambda: None, it.rooms) for it in processes]
        for acceptor in acceptors:
            acceptor.start()

        async def connect() -> str:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            open_ones.callback(writer.close)
            return (await reader.read(1)).decode()

        def clients(number: int) -> asyncio.Future[list[str]]:
            return asyncio.gather(*(connect() for _ in range(number)))

        try:
            async with asyncio.timeout(PATIENCE_S):
                yield clients
        finally:
            for acceptor in acceptors:
                acceptor.close()
                await acceptor.wait_closed()


@pytest.mark.parametrize("at_once", [1, 24])
async def test_each_gets_its_part(
    make: Callable[[str], Process], monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    from dynamo_local.engine.vllm.frontend import http_connections as its

    # Both are there, however busy the machine is.
    monkeypatch.setattr(its, "YIELD_S", PATIENCE_S)
    one, other = make("a"), make("b")
    async with accepting(one, other) as clients:
        for _ in range(24 // at_once):
            await clients(at_once)
        assert one.connections + other.connections == 24
        assert abs(one.connections - other.connections) <= 1


async def test_one_that_comes_later_gets_the_next(
    make: Callable[[str], Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dynamo_local.engine.vllm.frontend import http_connections as its

    monkeypatch.setattr(its, "YIELD_S", PATIENCE_S)
    one, other = make("a"), make("b")
    one.connections = 10
    one.rooms.note_connections(10)
    async with accepting(one, other) as clients:
        assert await clients(6) == ["b"] * 6


async def test_one_that_hangs_keeps_no_client_waiting(make: Callable[[str], Process]) -> None:
    one, hung = make("a"), make("b")
    hung.rooms.note_accepting(True)
    async with accepting(one) as clients:
        assert await clients(24) == ["a"] * 24


async def test_one_that_accepts_no_more_or_is_alone_has_no_part(make: Callable[[str], Process]) -> None:
    one, ended = make("a"), make("b")
    async with accepting(ended):
        assert one.rooms.connections_elsewhere() == [0]
    assert one.rooms.connections_elsewhere() == []
    async with accepting(one) as clients:
        assert await clients(24) == ["a"] * 24


async def test_a_connection_whose_handshake_fails_is_not_counted(make: Callable[[str], Process]) -> None:
    from dynamo_local.engine.vllm.frontend.http_connections import Acceptor

    one, other = make("a"), make("b")
    # It has no certificate, so that nobody can agree with it.
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        acceptor = Acceptor(listener.dup(), partial(_itself, one), lambda: tls, one.rooms)
        acceptor.start()
        try:
            async with asyncio.timeout(PATIENCE_S):
                for _ in range(3):
                    reader, writer = await asyncio.open_connection(*listener.getsockname())
                    writer.write(b"GET / HTTP/1.1\r\n\r\n")
                    with suppress(ConnectionError):
                        await reader.read()
                    writer.close()
        finally:
            acceptor.close()
            await acceptor.wait_closed()
    assert other.rooms.other_connections == 0


def test_files_of_tls_count_when_they_are_whole_and_go_together(tmp_path: Path) -> None:
    from uvicorn import Config

    from dynamo_local.engine.vllm.frontend.http_connections import Certificates

    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"

    def write(made: Certificate, *, whole: bool) -> None:
        certificate.write_bytes(made.chain)
        if whole:
            key.write_bytes(made.key)

    async def application(_scope: object, _receive: object, _send: object) -> None:
        return

    write(make_certificate("127.0.0.1"), whole=True)
    cipher = "ECDHE-ECDSA-AES256-GCM-SHA384"
    config = Config(application, log_config=None, ssl_certfile=certificate, ssl_keyfile=str(key), ssl_ciphers=cipher)
    config.load()
    certificates = Certificates(config)

    def looks() -> bool:
        """Whether two looks change the context."""
        before = config.ssl
        certificates.look()
        assert config.ssl is before, "a file that is seen once may not be whole yet"
        certificates.look()
        return config.ssl is not before

    assert not looks()
    new = make_certificate("127.0.0.1")
    write(new, whole=False)
    assert not looks(), "a certificate beside another one's key"
    write(new, whole=True)
    assert looks()
    assert config.ssl is not None
    assert [each["name"] for each in config.ssl.get_ciphers() if each["protocol"] != "TLSv1.3"] == [cipher]
    certificate.unlink()
    assert not looks()
    write(make_certificate("127.0.0.1"), whole=True)
    assert looks()
