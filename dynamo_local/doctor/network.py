"""Facts about the default port and proxies."""

from __future__ import annotations

from collections.abc import Mapping

from dynamo_local.core.doctor.network import Network
from state.machine.listeners import listener_on

_EXEMPT = ("no_proxy", "NO_PROXY")
_PROXIES = ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")


def network(host: str, port: int, environ: Mapping[str, str]) -> Network:
    listener = listener_on(host, port)
    return Network(
        port,
        None if listener is None else str(listener),
        listener is not None and listener.namespace is not None,
        tuple(name for name in _PROXIES if environ.get(name)),
        next((environ[name] for name in _EXEMPT if environ.get(name)), ""),
    )
