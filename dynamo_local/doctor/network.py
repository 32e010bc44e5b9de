"""The default port, and proxies that would catch requests to this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from dynamo_local.control.answers import Finding, ok, warn
from state.machine.listeners import Listener, listener_on

LOOPBACK = ("127.0.0.1", "localhost")
_EXEMPT = ("no_proxy", "NO_PROXY")
_PROXIES = ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")


def check_network(host: str, port: int, environ: Mapping[str, str]) -> Iterator[Finding]:
    yield default_port(port, listener_on(host, port))
    no_proxy = next((environ[name] for name in _EXEMPT if environ.get(name)), "")
    yield proxies([name for name in _PROXIES if environ.get(name)], no_proxy)


def default_port(port: int, listener: Listener | None) -> Finding:
    """`listener`: on the port; None if it is free."""
    if listener is None:
        return ok("port", f"port {port} is free")
    found = f"port {port} is used by {listener}"
    if listener.namespace is not None:
        return ok("port", found)
    return warn("port", found, "end that process, or serve with --port 0 (any free port)")


def proxies(names: Sequence[str], no_proxy: str) -> Finding:
    """`names`: of the variables that name a proxy for HTTP. `no_proxy`: hosts that are reached without."""
    if not names:
        return ok("proxy", "no proxy is set")
    caught = [host for host in LOOPBACK if not bypasses_proxy(host, no_proxy)]
    found = f"{', '.join(names)} set"
    if not caught:
        return ok("proxy", f"{found}, and NO_PROXY exempts this machine")
    return warn(
        "proxy",
        f"{found}: clients would ask the proxy for {' and '.join(caught)}",
        f"export NO_PROXY={','.join(filter(None, (no_proxy, *caught)))}",
    )


def bypasses_proxy(host: str, no_proxy: str) -> bool:
    """Whether $NO_PROXY exempts the host."""
    entries = (entry.strip().lstrip(".").partition(":")[0] for entry in no_proxy.split(","))
    return any(entry in ("*", host) or (host == LOOPBACK[0] and entry == "127.0.0.0/8") for entry in entries)
