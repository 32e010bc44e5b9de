"""KV on a TLS stream: what is read is right, whoever is another than expected gets nothing, and whoever falls silent
holds up nobody."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import DecodeError, structs

from dynamo_local.core.errors import EngineError
from dynamo_local.engine.vllm.kv import agents
from dynamo_local.engine.vllm.kv.agents import HERE, NetworkAgent, ReaderThread
from dynamo_local.engine.vllm.kv.stream import agent, server
from dynamo_local.engine.vllm.kv.stream.agent import StreamAgent
from dynamo_local.engine.vllm.kv.stream.server import REPLY, REQUEST, Ranges, StreamAddress, requests_of

HOST = "127.0.0.1"
PIECE, COUNT = 4096, 64
PATIENCE_S = 60.0
SHORT_S = 0.3


def address_in(metadata: bytes) -> StreamAddress:
    return msgspec.msgpack.decode(metadata, type=StreamAddress)


def nothing() -> None:
    """No thread needs preparation here."""


def rows(address: int, count: int = COUNT) -> Any:
    found = np.zeros((count, 3), dtype=np.uint64)
    found[:, 0], found[:, 1] = address + np.arange(count, dtype=np.uint64) * np.uint64(PIECE), PIECE
    return found


class Source:
    """An agent whose memory has its number in each piece, followed by some that it does not lend."""

    def __init__(self) -> None:
        self.memory = np.repeat(np.arange(COUNT + 1, dtype=np.uint8), PIECE)
        self.agent = StreamAgent(HOST, nothing)
        self.lent = self.agent.get_reg_descs([(self.address, COUNT * PIECE, 0, "")], "DRAM")
        self.agent.register_memory(self.lent)

    @property
    def address(self) -> int:
        return self.memory.ctypes.data

    @property
    def metadata(self) -> bytes:
        return self.agent.get_agent_metadata()

    def serves_by(self, monkeypatch: pytest.MonkeyPatch, serve: Callable[[ssl.SSLSocket], None]) -> None:
        """Have it do something else once a reader asks."""
        monkeypatch.setattr(self.agent._server, "_serve_read", serve)


class Reader:
    """An agent that is connected, with memory of its own."""

    def __init__(self, metadata: bytes, address: int) -> None:
        self.memory = np.full((COUNT + 1, PIECE), 255, dtype=np.uint8)
        self.agent = StreamAgent(HOST, nothing)
        self.thread = ReaderThread(self.agent, nothing)
        self.name = self.agent.add_remote_agent(metadata)
        self.local = self._prepared(HERE, self.memory.ctypes.data)
        self.remote = self._prepared(self.name, address)

    def _prepared(self, name: str, address: int) -> Any:
        return self.agent.prep_xfer_dlist(name, self.agent.get_xfer_descs(rows(address, COUNT + 1), "DRAM"))

    def begin(self, local: list[int], remote: list[int]) -> Any:
        indices = (np.array(side, dtype=np.int64) for side in (local, remote))
        read = self.thread.make_prepped_xfer("READ", self.local, next(indices), self.remote, next(indices))
        self.thread.transfer(read)
        return read

    def end(self, read: Any) -> None:
        """Raises what the read has failed with."""
        deadline = time.monotonic() + PATIENCE_S
        while self.thread.check_xfer_state(read) != "DONE":
            assert time.monotonic() < deadline
            self.thread.wait(0.01)

    def read(self, *pieces: int) -> None:
        self.end(self.begin(list(pieces), list(pieces)))

    def expect(self, found: dict[int, int]) -> None:
        """What each piece is full of, of those that have been written to."""
        expected = np.full_like(self.memory, 255)
        for piece, number in found.items():
            expected[piece] = number
        assert (self.memory == expected).all()

    @property
    def can_read_again(self) -> bool:
        return self.agent.check_remote_metadata(self.name)

    def close(self) -> None:
        self.thread.close()
        self.agent.close()


@pytest.fixture
def source() -> Iterator[Source]:
    source = Source()
    yield source
    source.agent.close()


@pytest.fixture
def reader(source: Source) -> Iterator[Reader]:
    reader = Reader(source.metadata, source.address)
    yield reader
    reader.close()


def hear(reader: ssl.SSLSocket) -> None:
    """Wait for a request: what is said before it is no answer."""
    reader.settimeout(PATIENCE_S)
    if not reader.recv(1 << 16):
        raise ConnectionResetError("it has ended")


def test_reads_that_were_asked_for_together_are_right(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_PIECES", 2)
    reads = [([1, 2, 3, 9, 20], [1, 2, 3, 8, 21]), ([30], [7]), ([40, 41, 50], [63, 0, 5])]
    begun = [reader.begin(*each) for each in reads]
    for read in begun:
        reader.end(read)
    reader.expect({here: there for local, remote in reads for here, there in zip(local, remote, strict=True)})
    assert reader.can_read_again


def test_another_certificate_is_told_no_secret(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[bytes] = []
    receive = server._receive

    def receive_and_note(*how: Any) -> bytes:
        heard.append(receive(*how))
        return heard[-1]

    monkeypatch.setattr(server, "_receive", receive_and_note)
    other = structs.replace(address_in(source.metadata), fingerprint=bytes(32))
    with pytest.raises(EngineError, match="by its certificate"):
        Reader(msgspec.msgpack.encode(other), source.address)
    # The source goes on serving those who know it, and hears them.
    reader = Reader(source.metadata, source.address)
    reader.read(5)
    assert heard[0] == server.MAGIC + address_in(source.metadata).secret
    reader.close()


def test_a_reader_that_asks_later_has_said_the_secret_at_once(source: Source) -> None:
    reader = Reader(source.metadata, source.address)
    # As long as it is not among the readers, it is a stranger whose time runs out.
    assert _until(lambda: len(source.agent._server._open) == 1)
    reader.read(5)
    reader.close()


def test_who_does_not_know_the_secret_reads_nothing(source: Source) -> None:
    stranger = Reader(
        msgspec.msgpack.encode(structs.replace(address_in(source.metadata), secret=bytes(32))), source.address
    )
    with pytest.raises(EngineError, match="cannot be read"):
        stranger.read(5)
    stranger.expect({})
    assert not stranger.can_read_again
    stranger.close()


def test_memory_that_is_no_kv_is_not_read(reader: Reader, source: Source) -> None:
    with pytest.raises(EngineError, match="ended the connection"):
        reader.read(COUNT)
    reader.expect({})
    other = Reader(source.metadata, source.address)
    source.agent.deregister_memory(source.lent)
    with pytest.raises(EngineError):
        other.read(3)
    other.expect({})
    other.close()


def test_a_source_that_ends_fails_what_is_asked_of_it(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, left = threading.Event(), threading.Event()

    def waits(_: ssl.SSLSocket) -> None:
        asked.set()
        left.wait(PATIENCE_S)

    source.serves_by(monkeypatch, waits)
    reader = Reader(source.metadata, source.address)
    read = reader.begin([1], [1])
    assert asked.wait(PATIENCE_S)
    source.agent.close()
    left.set()
    with pytest.raises(EngineError):
        reader.end(read)
    assert not reader.can_read_again
    reader.close()


@pytest.mark.parametrize("says", [b"", REPLY.pack(0, 2 * PIECE)[:5], REPLY.pack(0, 2 * PIECE) + b"x" * PIECE])
def test_a_source_that_falls_silent_holds_a_read_up_for_a_while_only(
    source: Source, says: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "STALL_S", SHORT_S)
    left = threading.Event()

    def half(to: ssl.SSLSocket) -> None:
        hear(to)
        to.sendall(says)
        left.wait(PATIENCE_S)
        # Nothing of this is written to the reader's memory.
        to.sendall(b"y" * PIECE)

    source.serves_by(monkeypatch, half)
    reader = Reader(source.metadata, source.address)
    first, second = reader.begin([1, 2], [1, 2]), reader.begin([8], [8])
    for read in (first, second):
        with pytest.raises(EngineError, match="nothing has come"):
            reader.end(read)
    left.set()
    reader.close()
    assert (reader.memory[2] == 255).all()
    assert (reader.memory[8] == 255).all()


@pytest.mark.parametrize("says", [REPLY.pack(7, 2 * PIECE), REPLY.pack(0, PIECE), b"garbage" * 9])
def test_an_answer_that_is_none_is_refused(source: Source, says: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    left = threading.Event()

    def wrong(to: ssl.SSLSocket) -> None:
        hear(to)
        to.sendall(says)
        left.wait(PATIENCE_S)

    source.serves_by(monkeypatch, wrong)
    reader = Reader(source.metadata, source.address)
    with pytest.raises(EngineError, match="something else"):
        reader.read(1, 2)
    left.set()
    reader.expect({})
    reader.close()


def test_a_read_that_is_taken_back_is_not_written_to(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    left = threading.Event()
    serve = source.agent._server._serve_read

    def late(to: ssl.SSLSocket) -> None:
        left.wait(PATIENCE_S)
        serve(to)

    source.serves_by(monkeypatch, late)
    reader = Reader(source.metadata, source.address)
    read = reader.begin([1], [1])
    assert _until(lambda: read.handle is not None and read.handle.read.left > 0)
    reader.thread.release_xfer_handle(read)
    left.set()
    with pytest.raises(EngineError, match="taken back"):
        reader.end(read)
    reader.expect({})
    reader.close()


def test_strangers_are_left_and_readers_served(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_HELLO_S", SHORT_S)
    where = (HOST, address_in(source.metadata).port)
    silent = [socket.create_connection(where) for _ in range(server.MOST_STRANGERS + 4)]
    for stranger, says in zip(silent, (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff", b"\0" * 9), strict=False):
        stranger.sendall(says)
    for stranger in silent:
        stranger.settimeout(PATIENCE_S)
        with stranger:
            assert _ends(stranger)
    reader = Reader(source.metadata, source.address)
    reader.read(7)
    reader.expect({7: 7})
    reader.close()


def test_a_source_goes_on_where_threads_were_short(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = threading.Event()
    start = threading.Thread.start

    def short(thread: threading.Thread) -> None:
        if thread.name == "KV stream reader" and not refused.is_set():
            refused.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", short)
    monkeypatch.setattr(source.agent._server, "_strangers", threading.BoundedSemaphore(1))
    with socket.create_connection((HOST, address_in(source.metadata).port)) as first:
        first.settimeout(PATIENCE_S)
        assert _ends(first)
    reader = Reader(source.metadata, source.address)
    reader.read(7)
    assert refused.is_set()
    reader.close()


@pytest.mark.parametrize("count", [0, server.MOST_PIECES + 1, 2**32 - 1])
def test_a_request_of_no_size_ends_the_connection(source: Source, count: int) -> None:
    address = address_in(source.metadata)
    secured = agent._secured(address)
    secured.settimeout(PATIENCE_S)
    with secured:
        secured.sendall(server.MAGIC + address.secret + REQUEST.pack(0, count))
        assert _ends(secured)


def _ends(connected: socket.socket) -> bool:
    try:
        while connected.recv(1024):
            pass
    except ConnectionError:
        # Ended with something unread.
        pass
    return True


def test_older_versions_of_tls_are_refused(source: Source) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    plain = socket.create_connection((HOST, address_in(source.metadata).port), PATIENCE_S)
    with plain, pytest.raises(OSError, match=r"(?i)version|alert|reset|closed"):
        context.wrap_socket(plain)


def test_metadata_is_checked_and_shows_no_secret(source: Source) -> None:
    address = address_in(source.metadata)
    assert address.secret.hex() not in repr(address)
    assert repr(address.secret) not in repr(address)
    for wrong in (b"", b"\x93\x01", msgspec.msgpack.encode(structs.replace(address, port=0)), source.metadata[:-1]):
        with pytest.raises(DecodeError):
            address_in(wrong)


def test_an_address_that_is_not_here_is_an_error() -> None:
    with pytest.raises(EngineError, match=r"cannot be served at 198\.51\.100\.1"):
        StreamAgent("198.51.100.1", nothing)


def test_readers_are_bounded_and_those_that_have_left_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MOST_READERS", 2)
    source = Source()
    for _ in range(2):
        readers = [Reader(source.metadata, source.address) for _ in range(2)]
        for reader in readers:
            reader.read(1)
        beyond = Reader(source.metadata, source.address)
        with pytest.raises(EngineError):
            beyond.read(1)
        for reader in (beyond, *readers):
            reader.close()
        assert _until(lambda: not source.agent._server._open)
    source.agent.close()


def _until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_a_machine_with_the_same_address_is_not_taken_for_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = (NetworkAgent(name, far=StreamAgent(HOST, nothing)) for name in ("near", "far"))
    monkeypatch.setattr(agents, "machine_id", lambda: "other")
    far._address = "172.17.0.1"
    metadata = far.get_agent_metadata()
    monkeypatch.undo()
    near._address = "172.17.0.2"
    assert near.check_remote_metadata(near.add_remote_agent(metadata))
    near._address = "172.17.0.1"
    with pytest.raises(EngineError, match=r"both machines have the address 172\.17\.0\.1"):
        near.add_remote_agent(metadata)
    for each in (near, far):
        each._far.close()


addresses = st.one_of(st.integers(0, 300), st.integers(2**64 - 300, 2**64 - 1))


@given(st.lists(st.tuples(st.integers(1, 250), st.integers(1, 50)), max_size=3), addresses, addresses)
def test_only_what_lies_within_one_range_is_lent(lent: list[tuple[int, int]], start: int, length: int) -> None:
    ranges = Ranges()
    ranges.add(lent)
    inside = length > 0 and any(begin <= start and start + length <= begin + size for begin, size in lent)
    pieces = np.array([[start, length]], dtype=np.uint64)
    if inside:
        assert ranges.check(pieces) == length
    else:
        with pytest.raises(EngineError):
            ranges.check(pieces)


@given(st.lists(st.integers(1, 40), max_size=30))
def test_a_read_is_asked_for_in_parts_that_a_source_takes(lengths: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "MOST_PIECES", 4)
        patch.setattr(server, "MOST_BYTES", 60)
        pieces = np.array([[0, length] for length in lengths], dtype=np.uint64).reshape(-1, 2)
        parts = list(requests_of(pieces))
    assert [length for part, _ in parts for length in lengths[part]] == lengths
    for part, size in parts:
        assert size == sum(lengths[part]) <= 60
        assert 0 < len(lengths[part]) <= 4
