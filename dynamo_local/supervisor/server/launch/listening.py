"""Checks, before anything is started, that an address can be listened on."""

from __future__ import annotations

import errno
import os
import secrets
import socket

from dynamo_local.core.errors import PortInUseError, UsageError
from dynamo_local.supervisor.server.launch.plan import HttpAddress
from state.machine.listeners import Listener, listener_on
from state.machine.threads import family_of

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
