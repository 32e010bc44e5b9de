"""An agent that reads KV of other machines on a TLS stream, and serves its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dynamo_local.core.errors import EngineError
from dynamo_local.engine.vllm.kv.memory_agent import HERE, Pieces, joined, pieces_of
from dynamo_local.engine.vllm.kv.stream.connection import Connection, StreamRead
from dynamo_local.engine.vllm.kv.stream.frames import pack_address, unpack_address
from dynamo_local.engine.vllm.kv.stream.ranges import Range
from dynamo_local.engine.vllm.kv.stream.server import StreamServer


@dataclass(frozen=True)
class _Blocks:
    """Stand in for NIXL's handle of a prepared list. `connection` is None for this process' own."""

    connection: Connection | None
    pieces: Pieces


@dataclass(frozen=True)
class _Transfer:
    connection: Connection
    read: StreamRead


class StreamAgent:
    """Stand in for a NIXL agent, as `MemoryAgent`. Memory is ordinary memory."""

    def __init__(self, host: str, prepare: Callable[[], None]) -> None:
        """`host`: address of this machine at which others reach it. `prepare` is called in each thread that serves.
        Raises EngineError."""
        try:
            self._server = StreamServer(host, prepare)
        except OSError as error:
            raise EngineError(f"KV cannot be served at {host}: {error}") from error
        self._connections: dict[str, Connection] = {}

    def get_reg_descs(self, ranges: Any, memory: str) -> list[Range]:
        """`ranges` are rows of address, length, device and a name."""
        return [(int(row[0]), int(row[1])) for row in ranges]

    def register_memory(self, ranges: list[Range]) -> None:
        """Let other machines read it."""
        self._server.register(ranges)

    def deregister_memory(self, ranges: list[Range]) -> None:
        """Let nobody read it. Reads under way fail."""
        self._server.deregister(ranges)

    def get_agent_metadata(self) -> bytes:
        """Say how this process is read. It has a secret."""
        return pack_address(self._server.address)

    def add_remote_agent(self, metadata: bytes) -> str:
        """Connect. Raises msgspec.DecodeError, and EngineError if it cannot be reached."""
        address = unpack_address(metadata)
        name = f"{address.host}:{address.port}-{address.fingerprint.hex()[:16]}"
        self.remove_remote_agent(name)
        self._connections[name] = Connection.open(address)
        return name

    def remove_remote_agent(self, name: str) -> None:
        if (connection := self._connections.pop(name, None)) is not None:
            connection.close()

    def check_remote_metadata(self, name: str) -> bool:
        """Whether it is worth while to read from there again."""
        connection = self._connections.get(name)
        return connection is not None and connection.alive()

    def get_xfer_descs(self, blocks: Any, memory: str) -> Pieces:
        return pieces_of(blocks)

    def prep_xfer_dlist(self, name: str, pieces: Pieces) -> _Blocks:
        return _Blocks(None if name == HERE else self._connections[name], pieces)

    def release_dlist_handle(self, blocks: _Blocks) -> None:
        """Do nothing: no resource is held."""

    def make_prepped_xfer(
        self, operation: str, local: _Blocks, local_indices: Any, remote: _Blocks, remote_indices: Any
    ) -> _Transfer:
        assert operation == "READ"
        assert remote.connection is not None
        pieces = joined(local.pieces[local_indices], remote.pieces[remote_indices])
        return _Transfer(remote.connection, StreamRead(*pieces))

    def transfer(self, transfer: _Transfer) -> str:
        """Ask for it. Raises EngineError."""
        transfer.connection.post(transfer.read)
        return "PROC"

    def check_xfer_state(self, transfer: _Transfer) -> str:
        """Receive what has come. Raises EngineError."""
        return "DONE" if transfer.connection.has_ended(transfer.read) else "PROC"

    def release_xfer_handle(self, transfer: _Transfer) -> None:
        """Take back a read that has not ended: by the end of its connection, which all that is read there shares."""
        if transfer.read.left:
            transfer.connection.close("a read of it was taken back")

    def close(self) -> None:
        """End all connections, and serve no more."""
        for name in list(self._connections):
            self.remove_remote_agent(name)
        self._server.close()
