"""The addresses of a server, checked before anything is started: of its bus, which is one of its own or a NATS server
of others; of its API; and the networks in which workers read KV."""

from __future__ import annotations

import errno
import ipaddress
import os
import secrets
import socket
import ssl
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from dynamo_local.bus.address import BusAddress
from dynamo_local.core.addresses import host_in_url
from dynamo_local.core.errors import PortInUseError, UsageError
from dynamo_local.sdk.config.resolved import ResolvedGraph
from dynamo_local.supervisor.server.launch.plan import LOOPBACK, HttpAddress
from state.machine.interfaces import interface_in, interfaces, network_of
from state.machine.listeners import Listener, listener_on
from state.machine.threads import family_of

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


# Checks, before anything is started, that an address can be listened on.

_PROBE_TIMEOUT_S = 1.0


def claim_address(host: str, port: int) -> HttpAddress:
    """Check that the address is free, and return it. Port 0 becomes any free port.

    Raises PortInUseError when the port is taken, UsageError when the host is not an address of this machine.
    """
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise UsageError(f"cannot listen on host {host!r}: {error.strerror}", "use 127.0.0.1") from error
    with socket.socket(family, kind, protocol) as probe:
        # As HTTP servers do: a port whose last connections are still timing out counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(target)
            probe.listen(1)
        except OSError as error:
            raise _refusal(host, target[0], port, error) from error
        return HttpAddress(host, probe.getsockname()[1], f"dynamo-local/http/{secrets.token_hex(16)}")


def answers(address: HttpAddress) -> bool:
    """Whether a descendant of this process accepts connections at the address. Blocks for up to a second.

    A service that is no frontend may never have bound it, and another program may have taken it since.
    """
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address.host, address.host)
    try:
        with socket.create_connection((host, address.port), _PROBE_TIMEOUT_S) as probe:
            owner = listener_on(probe.getpeername()[0], address.port)
    except OSError:
        return False
    return owner is not None and (owner.pid is None or owner.pid in family_of(os.getpid()))


def _refusal(host: str, address: object, port: int, error: OSError) -> UsageError:
    if error.errno == errno.EADDRINUSE:
        return _in_use(host, port, listener_on(str(address), port))
    if error.errno == errno.EACCES:
        return UsageError(f"only root may listen on port {port}", "pass a --port from 1024 on")
    return UsageError(f"cannot listen on {host}:{port}: {error.strerror}", "pass another --host or --port")


def _in_use(host: str, port: int, listener: Listener | None) -> PortInUseError:
    cause = f"port {port} on {host} is in use"
    another = "pass another --port, or 0 for any free one"
    if listener is None:
        return PortInUseError(cause, another)
    if listener.namespace is not None:
        another = f"stop it by `dynamo stop --namespace {listener.namespace}`, or {another}"
    return PortInUseError(f"{cause} by {listener}", another)


# The networks in which workers are to read KV between machines.

KV_NETWORK = "kv-network"


def check_kv_networks(graph: ResolvedGraph, *, here: bool) -> None:
    """As `check_kv_network`, for the settings of all services."""
    for cidr in sorted(
        {str(service.config[KV_NETWORK]) for service in graph.services if service.config.get(KV_NETWORK)}
    ):
        check_kv_network(cidr, here=here)


def check_kv_network(cidr: str | None, *, here: bool) -> None:
    """Raise UsageError for what is no network, and, if the workers are `here`, for one that this machine is not in."""
    if not cidr:
        return
    try:
        network = network_of(cidr)
    except ValueError as error:
        raise UsageError(f"--{KV_NETWORK} {error}") from error
    if here and interface_in(network) is None:
        known = ", ".join(f"{address} ({name})" for name, address in interfaces().items())
        raise UsageError(
            f"--{KV_NETWORK}: no interface of this machine has its address in {network}", f"it has {known or 'none'}"
        )
