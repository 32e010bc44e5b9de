"""What other users of the machine can connect to, of a server whose workers lend each other KV."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from dynamo_local.bus.address import BusAddress
from tests.e2e.llm_server import LlmServer
from tests.e2e.streams import WORKERS
from tests.integration.sockets import LISTENS, LOOPBACK, kernel_sockets, socket_inodes

pytest.importorskip("vllm", reason="vLLM is not installed")

_LISTENING_UNIX = 1 << 16
"""__SO_ACCEPTCON among the flags of /proc/net/unix."""

_DEVICES = "@dynamo-local/device/"
"""Names that answer with who holds a device, and carry nothing."""

_API = "@dynamo-local/http/"
"""Names at which the server hands the API's socket to processes of its own user alone (tests/unit/process)."""


def inodes_of(server: LlmServer) -> dict[str, int]:
    """Which process has a socket, by its inode."""
    found: dict[str, int] = {}
    for pid in server.tree():
        try:
            found |= dict.fromkeys(socket_inodes(pid), pid)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def port_of(url: str) -> int:
    return int(url.rstrip("/").rpartition(":")[2])


def title(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def internet(server: LlmServer) -> Iterator[tuple[str, int, str]]:
    """Address, port and process of all that can be reached by TCP or UDP."""
    inodes = inodes_of(server)
    for protocol in ("tcp", "tcp6", "udp", "udp6"):
        for row in kernel_sockets(protocol):
            if row[9] in inodes and (row[3] == LISTENS or protocol.startswith("udp")):
                address, _, port = row[1].rpartition(":")
                yield address, int(port, 16), f"{protocol} {row[1]} {title(inodes[row[9]])}"


def test_nothing_but_the_api_and_the_bus_can_be_connected_to(pair: LlmServer) -> None:
    """NATS wants its token: tests/integration/supervisor/test_supervisor.py."""
    pair.await_workers(len(WORKERS))
    known = {port_of(pair.url), port_of(BusAddress.load(pair.paths.bus_file).url)}
    open_ = list(internet(pair))
    assert not [what for _, port, what in open_ if port not in known]
    assert {port for _, port, _ in open_} == known, "not all of the server has been looked at"
    assert {address for address, _, _ in open_} == {LOOPBACK}


def test_unix_sockets_are_in_folders_of_the_servers_user_alone(pair: LlmServer) -> None:
    inodes = inodes_of(pair)
    listening = [row for row in kernel_sockets("unix") if row[6] in inodes and int(row[3], 16) & _LISTENING_UNIX]
    names = [row[7] if len(row) > 7 else "" for row in listening]
    paths = [Path(name) for name in names if not name.startswith((_DEVICES, _API))]
    assert paths
    # A long path is bound by way of a descriptor: what there is of that name is the server's.
    here = {path.name: path for path in pair.paths.root.rglob("*.sock")}
    whole = [here[path.name] if path.is_relative_to("/proc/self/fd") else path for path in paths]
    assert all(path.is_absolute() for path in whole), "a name without a file is everybody's"
    for path in whole:
        assert any(stat.S_IMODE(folder.stat().st_mode) == 0o700 for folder in path.parents), path


def test_files_of_the_server_tell_other_users_nothing(pair: LlmServer) -> None:
    assert stat.S_IMODE(pair.paths.root.stat().st_mode) == 0o700
    shared = {path for pid in pair.tree() for path in shared_memory_of(pid)}
    assert any(path.name.startswith("dynamo-") for path in shared)
    assert {stat.S_IMODE(path.stat().st_mode) for path in shared if path.exists()} == {0o600}


def shared_memory_of(pid: int) -> set[Path]:
    """What a process has mapped of /dev/shm."""
    with suppress(FileNotFoundError, ProcessLookupError):
        rows = Path(f"/proc/{pid}/maps").read_text().splitlines()
        return {Path(row[row.index("/dev/shm/") :]) for row in rows if "/dev/shm/" in row}
    return set()
