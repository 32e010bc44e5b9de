"""Two network namespaces with a bridge between: for the product, two machines in one network."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

NETWORK = "198.19.77.0/24"
HERE = "198.19.77.254"
"""Address of the test's own namespace."""


@dataclass(frozen=True)
class TwoMachines:
    """Names of the namespaces."""

    names: tuple[str, str]

    def command(self, name: str, *command: str) -> list[str]:
        """The command that runs another one there."""
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
    names = (f"{bridge}a", f"{bridge}b")
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("addr", "add", f"{HERE}/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for number, name in enumerate(names, 1):
            _ip("netns", "add", name)
            _ip("link", "add", name, "type", "veth", "peer", "name", "inner0", "netns", name)
            _ip("link", "set", name, "master", bridge, "up")
            _ip("-n", name, "addr", "add", f"198.19.77.{number}/24", "dev", "inner0")
            _ip("-n", name, "link", "set", "inner0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield TwoMachines(names)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
