"""Reads of another process' memory, which is real."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_local.core.errors import EngineError
from dynamo_local.engine.vllm.kv import agents
from dynamo_local.engine.vllm.kv.agents import MemoryAgent, why_unreadable
from state.statefile.model import Owner

PIECE = 64
COUNT = 256

SOURCE = f"""
import sys
import numpy as np
from dynamo_local.engine.vllm.kv.agents import MemoryAgent

agent = MemoryAgent("source", None)
memory = (np.arange({PIECE * COUNT}) // {PIECE}).astype(np.uint8)
print(agent.get_agent_metadata().hex(), memory.ctypes.data, flush=True)
sys.stdin.read()
"""


class Source:
    """A process in whose memory piece i is full of the byte i."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SOURCE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        metadata, address = self.process.stdout.readline().split()
        self.metadata, self.address = bytes.fromhex(metadata), int(address)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


class Reader:
    """An agent with memory for as many pieces, and the lists that vLLM prepares."""

    def __init__(self, source: Source) -> None:
        self.agent = MemoryAgent("reader", None)
        self.memory = np.zeros((COUNT, PIECE), dtype=np.uint8)
        self.name = self.agent.add_remote_agent(source.metadata)
        self.local = self._prepare("NIXL_INIT_AGENT", self.memory.ctypes.data)
        self.remote = self._prepare(self.name, source.address)

    def _prepare(self, name: str, address: int) -> Any:
        rows = [(address + index * PIECE, PIECE, 0) for index in range(COUNT)]
        return self.agent.prep_xfer_dlist(name, self.agent.get_xfer_descs(rows, "DRAM"))

    def read(self, local: list[int], remote: list[int]) -> str:
        indices = (np.array(side, dtype=np.int64) for side in (local, remote))
        transfer = self.agent.make_prepped_xfer("READ", self.local, next(indices), self.remote, next(indices))
        return self.agent.transfer(transfer)


@pytest.fixture(scope="module")
def source() -> Iterator[Source]:
    source = Source()
    yield source
    source.end()


@pytest.fixture
def victim() -> Iterator[Source]:
    """A source of a test's own."""
    source = Source()
    yield source
    source.end()


@settings(deadline=None, max_examples=50)
@given(data=st.data(), most=st.sampled_from([1, 7, 1024]))
def test_each_piece_is_read_to_its_place_and_nothing_else_is_written(
    source: Source, data: st.DataObject, most: int
) -> None:
    """However many are copied at once."""
    indices = st.lists(st.integers(0, COUNT - 1), unique=True)
    local = data.draw(indices)
    if data.draw(st.booleans()):
        local.sort()
    remote = data.draw(st.lists(st.integers(0, COUNT - 1), min_size=len(local), max_size=len(local)))
    reader = Reader(source)
    reader.memory[:] = 255
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agents, "_MOST_PIECES", most)
        assert reader.read(local, remote) == "DONE"
    expected = np.full((COUNT, PIECE), 255, dtype=np.uint8)
    for here, there in zip(local, remote, strict=True):
        expected[here] = there
    assert (reader.memory == expected).all()


def test_what_follows_one_another_at_both_sides_is_one_piece() -> None:
    local = np.array([[100, 10], [110, 10], [120, 5], [200, 5]], dtype=np.uint64)
    remote = np.array([[500, 10], [510, 10], [530, 5], [535, 5]], dtype=np.uint64)
    here, there = agents.joined(local, remote)
    assert here.tolist() == [[100, 20], [120, 5], [200, 5]]
    assert there.tolist() == [[500, 20], [530, 5], [535, 5]]


def test_no_call_copies_more_than_linux_does_at_once(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "_MOST_BYTES", 3 * PIECE)
    reader = Reader(source)
    everything = list(range(COUNT))
    assert reader.read(everything, everything) == "DONE"
    assert (reader.memory[:, 0] == everything).all()


def test_a_stopped_source_is_read_from(victim: Source) -> None:
    reader = Reader(victim)
    victim.process.send_signal(signal.SIGSTOP)
    assert reader.read([3], [200]) == "DONE"
    assert (reader.memory[3] == 200).all()


@pytest.mark.parametrize("reaped", [False, True])
def test_the_death_of_a_source_ends_reads(victim: Source, reaped: bool) -> None:
    reader = Reader(victim)
    assert reader.agent.check_remote_metadata(reader.name)
    victim.process.kill()
    if reaped:
        victim.process.wait()
    else:
        os.waitid(os.P_PID, victim.process.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(EngineError, match="No such process"):
        reader.read([1], [1])
    assert not reader.agent.check_remote_metadata(reader.name)
    with pytest.raises(EngineError, match="has ended"):
        Reader(victim)


def test_a_successor_of_the_same_pid_is_not_read_from(source: Source) -> None:
    owner = msgspec.msgpack.decode(source.metadata, type=Owner)
    other = msgspec.structs.replace(owner, start_time=owner.start_time - 1)
    with pytest.raises(EngineError, match="has ended"):
        MemoryAgent("reader").add_remote_agent(msgspec.msgpack.encode(other))


def test_what_was_copied_from_a_successor_does_not_count(victim: Source, source: Source) -> None:
    """A pid is reused between the looking and the reading."""
    reader = Reader(victim)
    victim.process.kill()
    victim.process.wait()
    peer = reader.remote.source
    peer.pid = source.process.pid
    reader.remote.pieces[:, 0] = source.address
    with pytest.raises(EngineError, match="has ended"):
        reader.read([1], [1])


def test_memory_that_is_not_there_is_an_error(source: Source) -> None:
    reader = Reader(source)
    reader.remote.pieces[1, 0] = 0
    with pytest.raises(EngineError, match="Bad address"):
        reader.read([1], [1])
    reader.remote.pieces[0] = (source.address, PIECE)
    with pytest.raises(EngineError, match="cannot be read to the end"):
        reader.read([0, 1], [0, 1])


@pytest.mark.parametrize("nonsense", [b"", b"nothing", msgspec.msgpack.encode({"pid": -1, "start_time": 0})])
def test_metadata_that_make_no_sense_are_refused(nonsense: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        MemoryAgent("reader").add_remote_agent(nonsense)


def test_no_descriptor_stays_of_a_peer_that_was_removed(source: Source) -> None:
    def descriptors() -> int:
        return sum("pidfd" in str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink())

    before = descriptors()
    reader = Reader(source)
    assert descriptors() == before + 1
    reader.agent.remove_remote_agent(reader.name)
    reader.agent.release_dlist_handle(reader.remote)
    assert reader.read([1], [1]) == "DONE"
    del reader.remote
    assert descriptors() == before


def test_who_may_read_is_known_beforehand(source: Source) -> None:
    assert why_unreadable(source.process.pid) is None


STRANGER = """
import os
from dynamo_local.engine.vllm.kv.agents import why_unreadable
if os.getuid() == 0:
    os.setresuid(65534, 65534, 65534)
    print(why_unreadable(os.getppid()))
else:
    print(why_unreadable(1))
"""


def test_other_users_may_not_read() -> None:
    done = subprocess.run([sys.executable, "-c", STRANGER], capture_output=True, text=True, check=True)
    assert "does not let an engine read another one's memory" in done.stdout
