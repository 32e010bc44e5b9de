"""TLS of a connection to NATS: who the server must be, and what is said where it is not."""

from __future__ import annotations

import asyncio
import ssl
from ipaddress import ip_address
from typing import Any
from urllib.parse import ParseResult

from dynamo_local.bus import without_websockets  # noqa: F401

# isort: split
from nats.aio.client import Client, Srv
from nats.aio.transport import TcpTransport

from dynamo_local.bus.address import BusAddress
from dynamo_local.core.errors import BusError

_NO_TLS = "WRONG_VERSION_NUMBER"
_HAS_TLS = "give its certificate authority (--nats-ca), and the address by which its certificate names it"


class TlsTransport(TcpTransport):
    """A TCP connection that can change to TLS, also without success."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._has_failed = False

    def __bool__(self) -> bool:
        # To the client, one that is false is none, and it would make one of its own.
        return True

    async def connect_tls(
        self, uri: str | ParseResult, ssl_context: ssl.SSLContext, buffer_size: int, connect_timeout: int
    ) -> None:
        """Change to TLS, and check that the server is who it should be. Raises ssl.SSLError, OSError, TimeoutError."""
        assert self._io_reader is not None
        assert self._io_writer is not None
        name = uri if isinstance(uri, str) else uri.hostname
        self._has_failed = True
        # Not as the base class does: it leaves a protocol that knows nothing of TLS, of which asyncio warns at the end
        # of each connection.
        # That keeps the reader, which goes on with what is in it: nothing may come between this look and TLS (wait_for
        # would let something).
        self._refuse_early(self._io_reader)
        async with asyncio.timeout(connect_timeout):
            await self._io_writer.start_tls(ssl_context, server_hostname=name)
        self._has_failed = False

    def _refuse_early(self, reader: asyncio.StreamReader) -> None:
        """Raise OSError for what came before TLS, after the greeting: later it would be taken for the server's."""
        if reader._buffer:  # type: ignore[attr-defined]
            raise OSError("said more than its greeting before TLS")

    def local_host(self) -> str:
        """This machine's address on the connection. Empty: it is no TLS, or has ended."""
        writer = self._io_writer
        if writer is None or writer.get_extra_info("ssl_object") is None or writer.is_closing():
            return ""
        return str(writer.get_extra_info("sockname")[0])

    async def wait_closed(self) -> None:
        """Wait until the connection has ended."""
        # Where TLS has not come about, nobody is told of the end.
        if not self._has_failed:
            await super().wait_closed()  # type: ignore[no-untyped-call]


class TlsClient(Client):
    """A client that, where `wants_tls`, says nothing to a server that has not proved by TLS who it is."""

    wants_tls = False

    async def _connect_to_server(self, s: Srv) -> None:
        if self._transport is None:
            self._transport = TlsTransport()
        await super()._connect_to_server(s)

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        if initial_connection and self.wants_tls:
            # The greeting comes before TLS, so anybody on the way could have changed it. The client would go by it, and
            # show its token in the clear.
            info["tls_required"] = True
            # Names of other servers are believed once they come over TLS.
            info.pop("connect_urls", None)
        await super()._process_info(info, initial_connection)


def local_host(client: TlsClient) -> str:
    """This machine's address on a connection of TLS that leads to other machines. Empty otherwise, and where the next
    connection may be another: without `wants_tls`, TLS is what the server's greeting asks for."""
    transport = client._transport if client.wants_tls else None
    host = transport.local_host() if isinstance(transport, TlsTransport) else ""
    return "" if not host or ip_address(host).is_loopback else host


def context_of(address: BusAddress) -> ssl.SSLContext | None:
    """How the server's certificate is checked; None for the client's own way, by the authorities that this machine
    trusts. Raises BusError."""
    if address.ca is None:
        return None
    try:
        return ssl.create_default_context(cadata=address.ca)
    except (ssl.SSLError, ValueError) as error:
        raise BusError(
            f"the certificate authority of NATS at {address.shown} cannot be read: {error}",
            "it must be one or more certificates in PEM",
        ) from error


def is_final(error: BaseException) -> bool:
    """Whether another attempt would fail in the same way."""
    return isinstance(error, ssl.SSLCertVerificationError) or (
        isinstance(error, ssl.SSLError) and error.reason == _NO_TLS
    )


def mismatch(address: BusAddress, error: ssl.SSLError) -> BusError:
    """The error for a server that does not prove who it is."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return BusError(f"the certificate of NATS at {address.shown} is not valid: {error.verify_message}", _HAS_TLS)
    if error.reason == _NO_TLS:
        return BusError(
            f"NATS at {address.shown} does not speak TLS", "enable TLS there; without it, write nats://HOST:PORT"
        )
    return BusError(f"no TLS with NATS at {address.shown}: {error.reason or error}", _HAS_TLS)
