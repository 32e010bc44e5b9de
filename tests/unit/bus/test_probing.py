"""All processes are asked for their presence, over an imitated NATS server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from msgspec.structs import replace

from dynamo_local.bus.address import BusAddress
from dynamo_local.bus.probing import probe, speaks_plainly
from dynamo_local.core import codec
from dynamo_local.core.errors import BusError
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.subjects import Subjects

SUBJECTS = Subjects("ns")
ONE = Presence("ns_One", "One", "service", "lease-1", 11, "ready")
TWO = Presence("ns_Two", "Two", "service", "lease-2", 12, "starting")
OLD = Presence("ns_chat@1_Worker", "Worker", "aggregated", "lease-3", 13, "draining")
NEW = Presence("ns_chat@2_Worker", "Worker", "aggregated", "lease-4", 14, "ready")


def message(presence: Presence, data: bytes | None = None, revision: str = "") -> bytes:
    data = codec.encode(presence) if data is None else data
    subject = Subjects("ns", revision).presence(presence.watcher, presence.role).encode()
    return b"MSG %s %d %d\r\n%s\r\n" % (subject, 2 if revision else 1, len(data), data)


@asynccontextmanager
async def nats(
    answers: Sequence[bytes], greeting: bytes = b"INFO {}\r\n", taken: bytes = b"PONG\r\n"
) -> AsyncIterator[tuple[BusAddress, list[bytes]]]:
    """A server that sends `answers` to the question. Yields its address, and the lines that it gets."""
    lines: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        while line := await reader.readline():
            lines.append(line.strip())
            if line == b"PING\r\n":
                writer.write(taken)
            if line.startswith(b"PUB "):
                for answer in answers:
                    writer.write(answer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        yield BusAddress(f"nats://127.0.0.1:{port}", "secret"), lines


async def test_all_who_are_awaited_are_heard() -> None:
    answers = [b"PING\r\n", message(ONE, b"\xff"), message(ONE), b"INFO {}\r\n", message(TWO)]
    async with nats(answers) as (address, lines):
        found = await probe(address, SUBJECTS, {"ns_One", "ns_Two"}, 60)
    assert found == {"ns_One": ONE, "ns_Two": TWO}
    assert lines[0].startswith(b"CONNECT ")
    assert b'"auth_token":"secret"' in lines[0]
    assert lines[2:5] == [
        f"SUB {SUBJECTS.presences} 1".encode(),
        f"SUB {SUBJECTS.presences_of_endpoints} 2".encode(),
        f"PUB {SUBJECTS.probe} 0".encode(),
    ]


async def test_workers_of_all_revisions_are_heard_and_a_frontend_only_as_a_process_of_the_graph() -> None:
    in_scope = replace(ONE, state="starting", detail="building")
    answers = [message(OLD, revision="chat@1"), message(ONE), message(in_scope, revision="chat@2")]
    async with nats([*answers, message(NEW, revision="chat@2")]) as (address, _):
        found = await probe(address, SUBJECTS, {"ns_chat@1_Worker", "ns_chat@2_Worker"}, 60)
    assert found == {"ns_chat@1_Worker": OLD, "ns_chat@2_Worker": NEW, "ns_One": ONE}


async def test_what_names_no_watcher_in_the_scope_of_an_endpoint_is_ignored() -> None:
    odd = replace(ONE, watcher="nothing")
    async with nats([message(odd, revision="chat@2"), message(TWO)]) as (address, _):
        assert await probe(address, SUBJECTS, {"ns_Two"}, 60) == {"ns_Two": TWO}


async def test_those_who_are_silent_are_left_out_after_a_while() -> None:
    async with nats([message(ONE)]) as (address, _):
        assert await probe(address, SUBJECTS, {"ns_One", "ns_Two"}, 0.2) == {"ns_One": ONE}


@pytest.mark.parametrize(
    ("greeting", "taken", "said"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n", b"", "no NATS server"),
        (b'INFO {"tls_required":true}\r\n', b"", "wants TLS"),
        (b"INFO {}\r\n", b"-ERR 'Authorization Violation'\r\n", "refuses this client: -ERR 'Authorization Violation'"),
    ],
)
async def test_a_server_that_cannot_be_asked_is_an_error(greeting: bytes, taken: bytes, said: str) -> None:
    async with nats([], greeting, taken) as (address, _):
        with pytest.raises(BusError, match=said):
            await probe(address, SUBJECTS, {"ns_One"}, 60)


async def test_no_server_is_an_error() -> None:
    async with nats([]) as (address, _):
        pass
    with pytest.raises(BusError, match="cannot connect"):
        await probe(address, SUBJECTS, {"ns_One"}, 60)


@pytest.mark.parametrize(
    ("url", "plainly"),
    [
        ("nats://127.0.0.1:4222", True),
        ("nats://[::1]:4222", True),
        ("tls://host:4222", False),
        ("nats://one:4222,nats://two:4222", False),
        ("nats://me:secret@host:4222", False),
    ],
)
def test_tls_and_users_need_the_client(url: str, plainly: bool) -> None:
    assert speaks_plainly(BusAddress(url)) is plainly
