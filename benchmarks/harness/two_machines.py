"""Two network namespaces with a bridge between: for the product, two machines in one network. The second one's line
goes through a relay, which delays, loses and withholds as it is told."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from benchmarks.harness.relay import Conditions


class Line:
    """The second machine's, in both directions."""

    def __init__(self, relay: subprocess.Popen[str]) -> None:
        self._relay = relay

    def set(self, conditions: Conditions) -> None:
        """Returns once they hold, for frames that come from now on."""
        assert self._relay.stdin is not None
        self._relay.stdin.write(msgspec.json.encode(conditions).decode() + "\n")
        self._relay.stdin.flush()
        self.expect("ok")

    def expect(self, word: str) -> None:
        assert self._relay.stdout is not None
        if (line := self._relay.stdout.readline().strip()) != word:
            raise RuntimeError(f"the relay said {line!r}, not {word!r}")


@dataclass(frozen=True)
class TwoMachines:
    """Names of the namespaces, the line to the second, and the addresses: of the network, of each machine, and of the
    namespace from which they were made (`here`)."""

    names: tuple[str, str]
    line: Line
    network: str
    addresses: tuple[str, str]
    here: str

    def command(self, name: str, *command: str) -> list[str]:
        """The command that runs another one there."""
        return in_namespace(name, *command)


def in_namespace(name: str, *command: str) -> list[str]:
    return ["ip", "netns", "exec", name, *command]


def why_not() -> str | None:
    """Say why this system makes no network namespaces; None if it does."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "network namespaces need root and `ip`"
    name = f"dynt{secrets.token_hex(3)}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    linked = subprocess.run(["ip", "link", "add", name, "type", "bridge"], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "link", "del", name], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    if made.returncode == 0 and linked.returncode == 0:
        return None
    return f"this system makes no network namespaces with bridges: {(made.stderr or linked.stderr).strip()}"


@contextmanager
def two_machines() -> Iterator[TwoMachines]:
    """Two network namespaces, for as long as the context lasts."""
    bridge = f"dynb{secrets.token_hex(3)}"
    near, far, between = f"{bridge}a", f"{bridge}b", f"{bridge}r"
    # Of the range for tests of networks (RFC 2544), drawn: others on this machine may have some as well.
    prefix = f"198.{18 + secrets.randbelow(2)}.{secrets.randbelow(256)}"
    addresses, here = (f"{prefix}.1", f"{prefix}.2"), f"{prefix}.254"
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("addr", "add", f"{here}/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for name in (near, far, between):
            _ip("netns", "add", name)
        _connect(bridge, near, "inner0", near)
        _connect(bridge, far, "switch0", between)
        _ip("-n", between, "link", "add", "machine0", "type", "veth", "peer", "name", "inner0", "netns", far)
        for name in ("switch0", "machine0"):
            _ip("-n", between, "link", "set", name, "up")
        for address, name in zip(addresses, (near, far), strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "inner0")
            _ip("-n", name, "link", "set", "inner0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        with _relay(between) as line:
            yield TwoMachines((near, far), line, f"{prefix}.0/24", addresses, here)
    finally:
        for name in (near, far, between):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True, check=False)


def _connect(bridge: str, name: str, inner: str, namespace: str) -> None:
    """Connect an interface of that namespace with the bridge, whose port gets this name."""
    _ip("link", "add", name, "type", "veth", "peer", "name", inner, "netns", namespace)
    _ip("link", "set", name, "master", bridge, "up")


@contextmanager
def _relay(namespace: str) -> Iterator[Line]:
    command = in_namespace(namespace, sys.executable, "-m", "benchmarks.harness.relay", "switch0", "machine0")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as relay:
        line = Line(relay)
        try:
            line.expect("ready")
            yield line
        finally:
            relay.kill()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
