"""Which bus a server has: one of its own and where that listens, or a NATS server of others."""

from __future__ import annotations

import ipaddress
import socket
import ssl
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from dynamo_local.bus.address import BusAddress
from dynamo_local.core.addresses import host_in_url
from dynamo_local.core.errors import UsageError

LOOPBACK = "127.0.0.1"

NATS_SERVER_ENV = "NATS_SERVER"
"""Address of the NATS server to use instead of starting one; --nats-url takes precedence."""

NATS_TOKEN_ENV = "NATS_TOKEN"
"""Token for the NATS server that NATS_SERVER or --nats-url names."""

NATS_CA_ENV = "NATS_CA"
"""File with the certificate authority of that NATS server; --nats-ca takes precedence."""

_PORT = 4222
_EXPECTED = "expected nats://HOST:PORT or tls://HOST:PORT"


def bus_of(
    url: str | None, ca: Path | None, host: str | None, environ: Mapping[str, str]
) -> tuple[BusAddress | None, str]:
    """The NATS server of others to use, or None, and the address that the server's own listens on.

    Raises UsageError for what is no address, and for an address that is not of this machine.
    """
    address = external_bus(url, environ, ca)
    if address is not None and host is not None:
        raise UsageError(
            "--bus-host is for the server's own NATS, and another one is to be used", "leave one of them out"
        )
    if host is None or host == LOOPBACK:
        return address, LOOPBACK
    return None, checked_host(host)


def external_bus(url: str | None, environ: Mapping[str, str], ca: Path | None = None) -> BusAddress | None:
    """The address of the NATS server to use: `url`, else $NATS_SERVER; None if neither is given.

    Servers of a cluster are separated by commas. The token is $NATS_TOKEN, or part of the URL (nats://TOKEN@host). A
    URL with user and password is kept as it is. `ca`: file with the authority of the server's certificate, else
    $NATS_CA. Raises UsageError for what is no NATS URL.
    """
    given = url or environ.get(NATS_SERVER_ENV)
    ca_file = ca or (Path(environ[NATS_CA_ENV]) if environ.get(NATS_CA_ENV) else None)
    if not given:
        if ca is not None:
            raise UsageError(
                "--nats-ca is for a NATS server of others, and none is named", "add --nats-url tls://HOST:PORT"
            )
        return None
    token = environ.get(NATS_TOKEN_ENV) or None
    urls, tokens = zip(*(_one(each.strip()) for each in given.split(",")), strict=True)
    address = BusAddress(",".join(urls), next(filter(None, tokens), token))
    if ca_file is None:
        return address
    if not all(each.startswith("tls://") for each in urls):
        raise UsageError(
            "there is a certificate authority for a NATS server without TLS", "write its address as tls://HOST:PORT"
        )
    return BusAddress(address.url, address.token, ca=_authority(ca_file))


def checked_host(host: str) -> str:
    """The host, if NATS can listen on it and clients find it there. Raises UsageError."""
    remedy = "name an address of this machine that the other machines reach (`ip address` lists them)"
    try:
        address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise UsageError(f"--bus-host: {host!r} is no address and no known name", remedy) from error
    if ipaddress.ip_address(address[4][0]).is_unspecified:
        raise UsageError(f"--bus-host: other machines cannot connect to {host}", remedy)
    with socket.socket(*address[:3]) as probe:
        try:
            probe.bind(address[4])
        except OSError as error:
            raise UsageError(f"--bus-host: {host} is no address of this machine: {error.strerror}", remedy) from error
    return host


def _one(url: str) -> tuple[str, str | None]:
    """The URL of one server, without the token that is part of it, and the token."""
    full = url if "://" in url else f"nats://{url}"
    try:
        parts = urlsplit(full)
        port = parts.port or _PORT
    except ValueError as error:
        raise UsageError(f"not an address of a NATS server: {error}", _EXPECTED) from error
    if parts.scheme not in ("nats", "tls") or not parts.hostname:
        raise UsageError("not an address of a NATS server", _EXPECTED)
    if parts.username and parts.password is None:
        return f"{parts.scheme}://{host_in_url(parts.hostname)}:{port}", unquote(parts.username)
    return full, None


def _authority(path: Path) -> str:
    remedy = "give the authority of the server's certificate"
    try:
        text = path.read_text(encoding="ascii")
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text)
    except (ssl.SSLError, ValueError) as error:
        raise UsageError(f"{path} holds no certificate authority in PEM", remedy) from error
    except OSError as error:
        raise UsageError(f"the certificate authority {path} cannot be read: {error.strerror}", remedy) from error
    return text
