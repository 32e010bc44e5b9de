"""The default port, and proxies that would catch requests to this machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dynamo_local.core.doctor.finding import Finding, ok, warn

LOOPBACK = ("127.0.0.1", "localhost")


@dataclass(frozen=True)
class Network:
    """`listener`: the process that listens on the default `port`, in words; None if the port is free. `is_ours`: it is
    one of our servers. `proxies`: names of the variables that name a proxy for HTTP. `no_proxy`: hosts that are reached
    without."""

    port: int
    listener: str | None
    is_ours: bool
    proxies: tuple[str, ...]
    no_proxy: str


def check_network(facts: Network) -> Iterator[Finding]:
    yield _port(facts)
    yield _proxies(facts)


def bypasses_proxy(host: str, no_proxy: str) -> bool:
    """Whether $NO_PROXY exempts the host."""
    entries = (entry.strip().lstrip(".").partition(":")[0] for entry in no_proxy.split(","))
    return any(entry in ("*", host) or (host == LOOPBACK[0] and entry == "127.0.0.0/8") for entry in entries)


def _port(facts: Network) -> Finding:
    if facts.listener is None:
        return ok("port", f"port {facts.port} is free")
    found = f"port {facts.port} is used by {facts.listener}"
    if facts.is_ours:
        return ok("port", found)
    return warn("port", found, "end that process, or serve with --port 0 (any free port)")


def _proxies(facts: Network) -> Finding:
    if not facts.proxies:
        return ok("proxy", "no proxy is set")
    caught = [host for host in LOOPBACK if not bypasses_proxy(host, facts.no_proxy)]
    found = f"{', '.join(facts.proxies)} set"
    if not caught:
        return ok("proxy", f"{found}, and NO_PROXY exempts this machine")
    return warn(
        "proxy",
        f"{found}: clients would ask the proxy for {' and '.join(caught)}",
        f"export NO_PROXY={','.join(filter(None, (facts.no_proxy, *caught)))}",
    )
