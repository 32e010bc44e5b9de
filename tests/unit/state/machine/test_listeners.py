"""The process that listens on a port."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from state.machine.listeners import Listener, listener_on

LISTEN = """
import socket
with socket.create_server(("127.0.0.1", 0)) as listener:
    print(listener.getsockname()[1], flush=True)
    input()
"""


@contextmanager
def listening(**environ: str) -> Iterator[tuple[int, int]]:
    """A process of another program: its pid and port."""
    process = subprocess.Popen(
        [sys.executable, "-c", LISTEN],
        env={**os.environ, **environ},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        yield process.pid, int(process.stdout.readline())
        process.communicate("\n")


def test_the_process_is_named() -> None:
    with listening() as (pid, port):
        for host in ("127.0.0.1", "0.0.0.0", "::"):
            found = listener_on(host, port)
            assert found is not None
            assert (found.pid, found.namespace) == (pid, None)
            assert str(found) == f"process {pid} ({found.name})"
            assert "python" in (found.name or "")


def test_a_process_of_a_server_is_known_by_its_environment() -> None:
    with listening(DYN_WATCHER="second_Frontend", DYN_NAMESPACE="second") as (pid, port):
        assert str(listener_on("127.0.0.1", port)) == f"the server of namespace second (pid {pid})"


def test_another_address_is_no_obstacle() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert listener_on("127.0.0.1", port) is not None
        assert listener_on("127.0.0.2", port) is None
    assert listener_on("127.0.0.1", port) is None


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
def test_ipv6_addresses_are_understood() -> None:
    try:
        listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    with listener:
        port = listener.getsockname()[1]
        found = listener_on("::1", port)
        assert found is not None
        assert found.pid == os.getpid()
        assert listener_on("127.0.0.1", port) is None


def test_of_another_users_process_the_user_is_told() -> None:
    assert str(Listener(user="root")) == "a process of user root"
