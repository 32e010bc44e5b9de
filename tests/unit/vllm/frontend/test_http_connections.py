"""uvicorn with bounds on its connections, before the gate, as clients find it: slow, greedy, many, and in a hurry."""

from __future__ import annotations

import asyncio
import errno
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from components.frontend.http.gate import HttpGate
from components.frontend.http.models import ModelEntry, ModelTable
from components.frontend.limits.places import Places
from components.frontend.limits.rooms import Rooms
from dynamo_local.core.http.asgi import Receive, Scope, Send
from dynamo_local.core.http.bounds.admission import AdmissionLimits
from dynamo_local.core.http.bounds.connections import GRACE_S
from dynamo_local.process.listener import bind

uvicorn = pytest.importorskip("uvicorn", reason="uvicorn comes with vLLM")

PATIENCE_S = 60.0
SOON = AdmissionLimits(header_timeout_s=0.6, body_timeout_s=0.6)
POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"


class Client:
    """A connection, driven by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """The next answer: status, headers, body."""
        async with asyncio.timeout(PATIENCE_S):
            first, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
            body = await self.reader.readexactly(int(headers["content-length"]))
        return int(first.split()[1]), headers, body

    async def rest(self) -> bytes:
        """Read what comes until the server ends the connection."""
        async with asyncio.timeout(PATIENCE_S):
            try:
                return await self.reader.read()
            except ConnectionError:
                return b""

    async def drip(self, piece: bytes) -> None:
        """Send a little now and then, until the server has had enough."""
        ended = asyncio.create_task(self.rest())
        while not ended.done():
            self.writer.write(piece)
            await asyncio.wait({ended}, timeout=0.02)
        await ended


class Server:
    """uvicorn, bounded, with a gate before an application that answers when it may."""

    def __init__(self, limits: AdmissionLimits) -> None:
        self.limits = limits
        self.open = asyncio.Event()
        self.open.set()
        self.requests: list[Scope] = []
        self.port = 0

    async def application(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        body, more = b"", True
        while more:
            event = await receive()
            body += event.get("body", b"")
            more = event.get("more_body", False)
        self.requests.append(scope)
        await self.open.wait()
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def connect(self) -> Client:
        return Client(*await asyncio.open_connection("127.0.0.1", self.port))

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():  # noqa: ASYNC110  # it tells nobody
                await asyncio.sleep(0.01)


@asynccontextmanager
async def serving(limits: AdmissionLimits, others: Rooms | None = None) -> AsyncIterator[Server]:
    from dynamo_local.engine.vllm.frontend.http_connections import Connections, acceptor_of

    server = Server(limits)
    models = ModelTable([ModelEntry(["m"], lambda: None, limits, server.application)])
    gate = HttpGate(server.application, limits=limits, models=models, is_draining=lambda: False)
    folder = TemporaryDirectory()
    rooms = others or Rooms(Places(Path(folder.name) / "limits"))
    connections = Connections(limits, rooms)
    config = uvicorn.Config(
        gate,
        log_level="critical",
        lifespan="off",
        http=connections.protocol,
        ws="none",
        timeout_keep_alive=60,
    )
    http = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server.port = listener.getsockname()[1]
        task = asyncio.create_task(http.serve(sockets=[]))
        await server.until(lambda: http.started)
        acceptor = acceptor_of(http, listener, rooms)
        http.servers.append(acceptor)
        acceptor.start()
        try:
            yield server
        finally:
            server.open.set()
            http.should_exit = http.force_exit = True
            await asyncio.wait_for(task, PATIENCE_S)
            folder.cleanup()


def post(body: bytes) -> bytes:
    return POST + b"Content-Length: %d\r\n\r\n" % len(body) + body


async def test_requests_follow_each_other_on_one_connection() -> None:
    async with serving(AdmissionLimits()) as server:
        client = await server.connect()
        for body in (b"{}", b'{"a": 1}', b'{"a": "%s"}' % (b"x" * 300_000)):
            client.writer.write(post(body))
            assert (await client.answer())[::2] == (200, body)
        client.writer.write(post(b'{"b": 1}') + post(b'{"b": 2}') + HEALTH)
        assert [(await client.answer())[2] for _ in range(3)] == [b'{"b": 1}', b'{"b": 2}', b""]


@pytest.mark.parametrize(
    ("begun", "piece"),
    [(b"", b""), (b"", b"\r\n"), (b"POST /v1", b"x"), (POST, b"A: b\r\n"), (HEALTH, b"\r\n"), (HEALTH, b"GET /x"[:3])],
    ids=["nothing", "empty lines", "a path", "headers", "nothing more", "a second request"],
)
async def test_a_head_that_does_not_come_ends_the_connection(begun: bytes, piece: bytes) -> None:
    async with serving(SOON) as server:
        client = await server.connect()
        client.writer.write(begun)
        await client.drip(piece)
        assert server.requests == []


async def test_who_is_late_with_a_head_is_told() -> None:
    async with serving(SOON) as server:
        client = await server.connect()
        client.writer.write(POST)
        status, headers, body = await client.answer()
        assert (status, headers["connection"], await client.rest()) == (408, "close", b"")
        assert "header-timeout-s" in json.loads(body)["error"]["message"]


async def test_a_body_that_does_not_come_ends_the_request() -> None:
    async with serving(SOON) as server:
        client = await server.connect()
        client.writer.write(POST + b"Content-Length: 100\r\n\r\n{")
        status, _, body = await client.answer()
        assert (status, await client.rest()) == (408, b"")
        assert "body-timeout-s" in json.loads(body)["error"]["message"]


async def test_what_is_left_of_a_refused_body_is_not_waited_for() -> None:
    async with serving(SOON) as server:
        client = await server.connect()
        client.writer.write(POST + b"Content-Length: 99999999999\r\n\r\n")
        assert (await client.answer())[0] == 413
        await client.drip(b"x" * 100)


async def test_an_answer_may_take_longer_than_any_deadline() -> None:
    async with serving(SOON) as server:
        server.open.clear()
        client = await server.connect()
        client.writer.write(post(b"{}") + b"POST /v1")  # and begins the next one meanwhile
        await server.until(lambda: server.requests)
        await asyncio.sleep(3 * SOON.header_timeout_s)
        server.open.set()
        assert (await client.answer())[0] == 200


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"x" * 200_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
        HEALTH[:-2] + b"A: " + b"x" * 200_000 + b"\r\n\r\n",
        HEALTH[:-2] + b"x" * 200_000 + b": a\r\n\r\n",
        HEALTH[:-2] + b"A: b\r\n" * 5000 + b"\r\n",
    ],
    ids=["path", "value", "name", "number"],
)
@pytest.mark.parametrize("whole", [True, False], ids=["at once", "in pieces"])
async def test_a_large_head_is_refused(head: bytes, whole: bool) -> None:
    async with serving(AdmissionLimits()) as server:
        client = await server.connect()
        pieces = [head] if whole else [head[i : i + 5000] for i in range(0, 40_000, 5000)]
        for piece in pieces:
            client.writer.write(piece)
            await client.writer.drain()
        status, _, body = await client.answer()
        assert (status, "(setting max-header" in json.loads(body)["error"]["message"]) == (431, True)


async def test_what_follows_a_body_in_chunks_is_no_header_and_bounded() -> None:
    async with serving(AdmissionLimits()) as server:
        chunked = POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
        client = await server.connect()
        client.writer.write(chunked + b"X-Late: 1\r\n\r\n")
        assert (await client.answer())[0] == 200
        assert all(name != b"x-late" for name, _ in server.requests[0]["headers"])
        client.writer.write(chunked)
        await client.drip(b"X-Late: " + b"x" * 10_000)
        assert len(server.requests) == 1


async def test_a_request_for_a_websocket_is_answered_as_what_it_is() -> None:
    async with serving(AdmissionLimits()) as server:
        client = await server.connect()
        upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13\r\n"
        client.writer.write(b"GET /v1/realtime HTTP/1.1\r\nHost: a\r\n" + upgrade + b"\r\n")
        assert (await client.answer())[0] == 404


async def test_beyond_the_limit_there_is_room_for_monitoring() -> None:
    from dynamo_local.engine.vllm.frontend.http_connections import RESERVE

    async with serving(AdmissionLimits(max_connections=3)) as server, AsyncExitStack() as held:
        server.open.clear()
        for _ in range(3):
            client = await server.connect()
            held.callback(client.writer.close)
            client.writer.write(post(b"{}"))
        await server.until(lambda: len(server.requests) == 3)
        for request, status in ((HEALTH, 200), (post(b"{}"), 503), (HEALTH, 200)):
            client = await server.connect()
            client.writer.write(request)
            found, headers, _ = await client.answer()
            assert (found, headers["connection"]) == (status, "close")
            await client.rest()
        # Nor are there any number of those.
        crowd = [asyncio.create_task((await server.connect()).rest()) for _ in range(RESERVE + 20)]
        await server.until(lambda: sum(task.done() for task in crowd) >= 20)
        assert sum(task.done() for task in crowd) == 20
        for task in crowd:
            task.cancel()


async def test_who_only_waits_makes_room_for_others() -> None:
    async with serving(AdmissionLimits(max_connections=3)) as server:
        idle = [await server.connect() for _ in range(2)]
        busy = await server.connect()
        server.open.clear()
        busy.writer.write(post(b"{}"))
        await server.until(lambda: server.requests)
        await asyncio.sleep(1.5 * GRACE_S)
        later = await server.connect()
        later.writer.write(HEALTH)
        _, headers, _ = await later.answer()
        assert "connection" not in headers
        assert await idle[0].rest() == b""
        idle[1].writer.write(HEALTH)
        assert (await idle[1].answer())[0] == 200
        server.open.set()
        assert (await busy.answer())[0] == 200


@pytest.mark.parametrize(("files", "connections"), [((300, 300), 12), ((300, 2000), 1024), ((5000, 5000), 1024)])
def test_no_more_connections_are_held_than_files_may_be_open(files: tuple[int, int], connections: int) -> None:
    """Ask in a process of its own: the limit is that process'."""
    program = (
        f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, {files})\n"
        "from dynamo_local.engine.vllm.frontend.http_connections import _affordable\n"
        "print(_affordable(1024), resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    found, limit = map(int, done.stdout.split())
    assert (found, limit) == (connections, min(files[1], max(files[0], 1312)))


def test_a_client_that_leaves_its_answer_unread_is_given_up() -> None:
    with bind("127.0.0.1", 0) as listener:
        assert 0 < listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 60_000
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 500)
        listener.listen()
        with socket.create_connection(listener.getsockname()):
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(PATIENCE_S)
                with pytest.raises(OSError, match="timed out") as caught:
                    connection.sendall(bytes(64 << 20))
                assert caught.value.errno == errno.ETIMEDOUT


async def test_connections_of_several_frontends_have_one_limit_together(tmp_path: Path) -> None:
    limits = AdmissionLimits(max_connections=2)
    rooms = [Rooms(Places(tmp_path / "limits")) for _ in range(2)]
    async with serving(limits, rooms[0]) as one, serving(limits, rooms[1]) as other:
        idle = [await one.connect() for _ in range(2)]
        await one.until(lambda: rooms[1].other_connections == 2)
        refused = await other.connect()
        refused.writer.write(post(b"{}"))
        assert (await refused.answer())[0] == 503
        # The one with connections that wait for their clients is told, and ends the one that has waited longest.
        await one.until(lambda: rooms[1].other_connections == 1)
        assert await idle[0].rest() == b""
        served = await other.connect()
        served.writer.write(post(b"{}"))
        assert (await served.answer())[0] == 200
        assert rooms[0].other_connections == 1
