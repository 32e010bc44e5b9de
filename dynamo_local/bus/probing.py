"""Asks all processes for their presence once, over a connection for this alone.

Speaks the few words of NATS's protocol that this takes: to import the client would take a third of the time of
`dynamo ps`. https://docs.nats.io/reference/reference-protocols/nats-protocol
"""

from __future__ import annotations

import asyncio
import logging
import time
from asyncio import StreamReader, StreamWriter
from collections.abc import Set
from contextlib import suppress
from urllib.parse import urlsplit

import msgspec

from dynamo_local.bus.address import BusAddress
from dynamo_local.core import codec
from dynamo_local.core.errors import BusError, ConfigError, DecodeError
from dynamo_local.core.messages.presence import Presence, as_received
from dynamo_local.core.names import parse_watcher
from dynamo_local.core.subjects import Subjects

_log = logging.getLogger(__name__)

_CONNECT_WITHIN_S = 2.0
_PORT = 4222

_OF_GRAPH, _OF_ENDPOINTS = "1", "2"
"""Ids of the subscriptions to presences."""


class _Info(msgspec.Struct):
    """What matters here of a server's greeting."""

    tls_required: bool = False


class _Connect(msgspec.Struct):
    auth_token: str | None = None
    user: str | None = None
    password: str | None = msgspec.field(name="pass", default=None)
    verbose: bool = False
    pedantic: bool = False
    protocol: int = 1
    lang: str = "python"
    version: str = "1"
    name: str = "ps"

    @classmethod
    def by(cls, address: BusAddress) -> _Connect:
        if address.user is None:
            return cls(auth_token=address.token)
        return cls(user=address.user, password=address.token)


def speaks_plainly(address: BusAddress) -> bool:
    """Whether `probe` can be used: one server, no TLS, and a token if anything."""
    if len(address.urls) > 1:
        return False
    parts = urlsplit(address.url)
    return parts.scheme == "nats" and bool(parts.hostname) and parts.username is None


async def probe(address: BusAddress, subjects: Subjects, awaited: Set[str], within_s: float) -> dict[str, Presence]:
    """The presences of all processes of the graph and of all endpoints that announce themselves within `within_s`, by
    watcher.

    Returns once all watchers in `awaited` have. Raises BusError if the server cannot be reached or refuses this client.
    """
    parts = urlsplit(address.url)
    heard: dict[str, Presence] = {}
    try:
        async with asyncio.timeout(_CONNECT_WITHIN_S):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port or _PORT)
            await _greet(reader, writer, address)
    except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
        raise BusError(f"cannot connect to NATS at {address.shown}: {error}") from error
    try:
        questions = (
            f"SUB {subjects.presences} {_OF_GRAPH}",
            f"SUB {subjects.presences_of_endpoints} {_OF_ENDPOINTS}",
            f"PUB {subjects.probe_of_all} 0",
            "",
        )
        writer.write("\r\n".join((*questions, "")).encode())
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not awaited <= heard.keys():
                    if (presence := await _next_presence(reader, writer)) is not None:
                        heard[presence.watcher] = presence
    except (OSError, asyncio.IncompleteReadError) as error:
        raise BusError(f"NATS at {address.shown} ended the connection") from error
    finally:
        writer.close()
    return heard


async def _greet(reader: StreamReader, writer: StreamWriter, address: BusAddress) -> None:
    """Exchange greetings, and wait until the server has taken this client. Raises BusError."""
    greeting = await reader.readline()
    try:
        info = msgspec.json.decode(greeting.removeprefix(b"INFO "), type=_Info)
    except msgspec.DecodeError as error:
        raise BusError("what answers there is no NATS server") from error
    if info.tls_required:
        raise BusError("the NATS server wants TLS", "write its address as tls://HOST:PORT")
    writer.write(b"CONNECT " + msgspec.json.encode(_Connect.by(address)) + b"\r\nPING\r\n")
    while (line := await _line(reader)) != b"PONG":
        if line.startswith(b"-ERR"):
            raise BusError(f"NATS refuses this client: {line.decode(errors='replace')}")


async def _next_presence(reader: StreamReader, writer: StreamWriter) -> Presence | None:
    """Read the server's next line. None for all but a presence."""
    line = await _line(reader)
    if line == b"PING":
        writer.write(b"PONG\r\n")
    if line.startswith(b"-ERR"):
        raise BusError(f"NATS ended the connection: {line.decode(errors='replace')}")
    if not line.startswith(b"MSG "):
        return None
    _, _, subscription, *_, size = line.split()
    data = await reader.readexactly(int(size) + len(b"\r\n"))
    try:
        presence = as_received(codec.decode(data[:-2], Presence), time.monotonic())
        # A frontend announces itself in each revision that it serves, beside its presence as a process of the graph.
        is_repeated = subscription == _OF_ENDPOINTS.encode() and not parse_watcher(presence.watcher).revision
    except (ConfigError, DecodeError) as error:
        _log.warning("the announcement of a process cannot be read: %s", error)
        return None
    return None if is_repeated else presence


async def _line(reader: StreamReader) -> bytes:
    return (await reader.readuntil(b"\r\n")).strip()
