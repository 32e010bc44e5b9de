"""Which address of this machine a connection to NATS tells of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dynamo_local.bus.tls import TlsClient, TlsTransport, local_host


def client_on(host: str, *, tls: bool = True, wants_tls: bool = True, ends: bool = False) -> TlsClient:
    """A client that is connected from that address."""
    extra = {"sockname": (host, 4222), "ssl_object": object() if tls else None}
    writer: Any = SimpleNamespace(get_extra_info=extra.get, is_closing=lambda: ends)
    client, transport = TlsClient(), TlsTransport()
    client.wants_tls, client._transport, transport._io_writer = wants_tls, transport, writer
    return client


@pytest.mark.parametrize("host", ["10.1.2.3", "2001:db8::1"])
def test_a_connection_on_tls_to_another_machine_tells_its_address(host: str) -> None:
    assert local_host(client_on(host)) == host


@pytest.mark.parametrize(
    "client",
    [
        TlsClient(),
        client_on("127.0.0.1"),
        client_on("10.1.2.3", tls=False),
        client_on("10.1.2.3", ends=True),
        # On TLS now, because a greeting said so: whoever is on the way can have the next connection do without.
        client_on("10.1.2.3", wants_tls=False),
    ],
)
def test_others_tell_none(client: TlsClient) -> None:
    assert not local_host(client)
