"""Agents in the place of NIXL's, for engines that compute in ordinary memory: `MemoryAgent` reads on this machine,
`NetworkAgent` on others as well. `ReaderThread` has any agent, NIXL's too, read beside the engine's steps."""

from __future__ import annotations

import ctypes
import errno
import importlib
import os
import select
import threading
import weakref
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from dynamo_local.core.errors import EngineError
from dynamo_local.engine.vllm.environment import IMPORT_DEFAULTS
from state.machine.identity import machine_id
from state.machine.interfaces import interfaces
from state.machine.processes import alive, this_process
from state.statefile.model import Owner

# Reads of KV where engines compute in ordinary memory: the reader copies straight from the other process' memory.
#
# The kernel does the copying (process_vm_readv(2)), for processes of the same user only. So nothing listens, no thread
# waits for readers, and the source takes no part: it may be busy or stopped. The death of the source ends a read at
# once.

_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = -1

_MOST_PIECES = 1024
"""Pieces of one call: IOV_MAX."""
_MOST_BYTES = 1 << 30
"""Bytes of one call. Linux copies less than 2 GiB at once."""

HERE = "NIXL_INIT_AGENT"
"""Name that vLLM gives to the agent's own side."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t
_libc.process_vm_readv.argtypes = (
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
)
_libc.prctl.argtypes = (ctypes.c_int, ctypes.c_long, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong)

Pieces = NDArray[np.uint64]
"""Rows of address and length."""

_owner_decoder = msgspec.msgpack.Decoder(Owner)
_owner_encoder = msgspec.msgpack.Encoder()


class Peer:
    """Process whose memory is read."""

    def __init__(self, owner: Owner) -> None:
        """Raises EngineError."""
        self.pid = owner.pid
        try:
            self._descriptor = os.pidfd_open(owner.pid)
        except OSError as error:
            raise EngineError("the other engine's process has ended") from error
        weakref.finalize(self, os.close, self._descriptor)
        # Checked after opening: from here on the descriptor cannot come to mean another process.
        if not alive(owner.pid, owner.start_time):
            raise EngineError("the other engine's process has ended")

    def alive(self) -> bool:
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        return not poll.poll(0)

    def read(self, local: Pieces, remote: Pieces) -> None:
        """Copy each remote piece to the local one of the same length. Raises EngineError."""
        longest = int(remote[:, 1].max(initial=1))
        pieces = min(_MOST_PIECES, max(_MOST_BYTES // longest, 1))
        for start in range(0, len(remote), pieces):
            part = slice(start, start + pieces)
            self._read(*joined(local[part], remote[part]))
        # While it lives, no other process has its number.
        if not self.alive():
            raise EngineError("the other engine's process has ended")

    def _read(self, local: Pieces, remote: Pieces) -> None:
        count = len(remote)
        copied = _libc.process_vm_readv(self.pid, local.ctypes.data, count, remote.ctypes.data, count, 0)
        if copied < 0:
            raise EngineError(f"the other engine's memory cannot be read: {os.strerror(ctypes.get_errno())}")
        if copied != int(remote[:, 1].sum()):
            raise EngineError("the other engine's memory cannot be read to the end")


@dataclass(frozen=True)
class Blocks:
    """Stand in for NIXL's handle of a prepared list. `source`: where they are read; None for this process' own."""

    source: Any
    pieces: Pieces


class OwnAgent:
    """What agents have in common that stand in for one of NIXL's: lists of blocks in ordinary memory."""

    def __init__(self) -> None:
        self._sources: dict[str, Any] = {}
        """Known agents: each can tell whether it is `alive`."""

    def check_remote_metadata(self, name: str) -> bool:
        """Whether it is worth while to read from there again."""
        source = self._sources.get(name)
        return source is not None and bool(source.alive())

    def get_xfer_descs(self, blocks: Any, memory: str) -> Pieces:
        return pieces_of(blocks)

    def prep_xfer_dlist(self, name: str, pieces: Pieces) -> Blocks:
        return Blocks(None if name == HERE else self._sources[name], pieces)

    def release_dlist_handle(self, blocks: Blocks) -> None:
        """Do nothing: no resource is held."""


@dataclass(frozen=True)
class Transfer:
    """Stand in for NIXL's handle of a transfer."""

    peer: Peer
    local: Pieces
    remote: Pieces


class MemoryAgent(OwnAgent):
    """Stand in for a NIXL agent, with all that vLLM's connector and `ReaderThread` use of one."""

    def __init__(self, name: str, config: object = None) -> None:
        """`config` is NIXL's."""
        super().__init__()
        self.name = name
        _allow_reading()

    def get_reg_descs(self, ranges: Any, memory: str) -> Any:
        return ranges

    def register_memory(self, ranges: Any, backends: Any = None) -> None:
        """Do nothing: memory needs no preparation to be read."""

    def deregister_memory(self, ranges: Any) -> None:
        """Do nothing, as `register_memory`."""

    def get_agent_metadata(self) -> bytes:
        """Name this process. vLLM tells where its blocks are."""
        return _owner_encoder.encode(this_process())

    def add_remote_agent(self, metadata: bytes) -> str:
        """Raises msgspec.DecodeError, and EngineError if that process has ended."""
        owner = _owner_decoder.decode(metadata)
        name = f"{owner.pid}-{owner.start_time}"
        self._sources[name] = Peer(owner)
        return name

    def remove_remote_agent(self, name: str) -> None:
        """Forget an agent. The handle of its process is closed with the last list of its blocks."""
        self._sources.pop(name, None)

    def make_prepped_xfer(
        self, operation: str, local: Blocks, local_indices: Any, remote: Blocks, remote_indices: Any
    ) -> Transfer:
        assert operation == "READ"
        assert remote.source is not None
        return Transfer(remote.source, local.pieces[local_indices], remote.pieces[remote_indices])

    def transfer(self, transfer: Transfer) -> str:
        """Returns when everything has been copied. Raises EngineError."""
        transfer.peer.read(transfer.local, transfer.remote)
        return "DONE"

    def release_xfer_handle(self, transfer: Transfer) -> None:
        """Do nothing: no resource is held."""


def why_unreadable(pid: int) -> str | None:
    """Say why this system lets no process read that one's memory, if so. Both are of one user; that one has made a
    `MemoryAgent`, or is a child of this one."""
    byte = np.zeros(1, dtype=np.uint8)
    local = np.array([[byte.ctypes.data, 1]], dtype=np.uint64)
    # No memory is mapped there: the kernel checks the permission before it looks at the address.
    remote = np.array([[0, 1]], dtype=np.uint64)
    copied = _libc.process_vm_readv(pid, local.ctypes.data, 1, remote.ctypes.data, 1, 0)
    number = ctypes.get_errno()
    if copied >= 0 or number in (errno.EFAULT, errno.ESRCH):
        return None
    return (
        "this system does not let an engine read another one's memory (process_vm_readv: "
        f"{os.strerror(number)}; kernel.yama.ptrace_scope above 1, or a container's seccomp profile)"
    )


def _allow_reading() -> None:
    """Yama, where it is on, lets only ancestors read a process' memory, unless that one has said otherwise. Other users
    may not in any case."""
    # Fails where there is no Yama.
    _libc.prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)


def pieces_of(blocks: Any) -> Pieces:
    """Addresses and lengths of blocks, as vLLM gives them: rows of address, length and device."""
    return np.ascontiguousarray(np.asarray(blocks, dtype=np.uint64)[:, :2])


def joined(local: Pieces, remote: Pieces) -> tuple[Pieces, Pieces]:
    """The same, with those as one piece that follow one another at both sides."""
    follows = (local[:-1].sum(axis=1) == local[1:, 0]) & (remote[:-1].sum(axis=1) == remote[1:, 0])
    starts = np.flatnonzero(np.concatenate(([True], ~follows)))
    lengths = np.add.reduceat(remote[:, 1], starts)
    return np.column_stack((local[starts, 0], lengths)), np.column_stack((remote[starts, 0], lengths))


# Agents of engines that compute in ordinary memory and are read by other machines as well: KV of this machine is
# copied from the other process' memory, KV of others is read by NIXL or on a stream (stream/).
#
# NIXL's transport (UCX) has neither authentication nor encryption. It listens on the interface of the network that the
# admin has declared closed, and on no other.

_DEVICES, _TRANSPORTS, _BRIDGES = "UCX_NET_DEVICES", "UCX_TLS", "UCX_TCP_BRIDGE_ENABLE"
_CONNECTS, _UNHEARD = "UCX_TCP_SYN_CNT", "UCX_TCP_USER_TIMEOUT"


def bind_transport(device: str, *, only_tcp: bool, environ: MutableMapping[str, str] = os.environ) -> None:
    """Have UCX use this interface in agents that are made from now on. What the user has set stays.

    `only_tcp`: not the ways between processes of a machine, which engines in ordinary memory do not need.
    """
    if environ.get(_DEVICES) in (None, IMPORT_DEFAULTS[_DEVICES]):
        environ[_DEVICES] = device
        # UCX leaves bridges out, and finds no interface at all then.
        environ.setdefault(_BRIDGES, "y")
        # It waits for connections, and nothing else is connected to or read meanwhile: 3 s, where no answer comes, in
        # place of the system's two minutes.
        environ.setdefault(_CONNECTS, "1")
        # The blocks of a read whose source does not hear that it is asked are kept for so long, in place of the
        # system's quarter of an hour.
        environ.setdefault(_UNHEARD, "10s")
    if only_tcp:
        environ.setdefault(_TRANSPORTS, "tcp")


class _Metadata(msgspec.Struct, frozen=True, array_like=True):
    machine: str
    near: bytes
    far: bytes
    address: str = ""
    """Address of `machine` in the network in which NIXL reads."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Metadata)


@dataclass(frozen=True)
class _Lists:
    """Stand in for NIXL's handle of a prepared list: ours, NIXL's, or for the own side both."""

    near: Any = None
    far: Any = None


@dataclass(frozen=True)
class _EitherTransfer:
    agent: Any
    handle: Any


class NetworkAgent:
    """Stand in for a NIXL agent, as `MemoryAgent`."""

    def __init__(self, name: str, config: object = None, far: Any = None) -> None:
        """`config` is NIXL's. `far`: the agent for other machines; None: one of NIXL's, on the interface that
        `bind_transport` has set. Raises what NIXL raises."""
        self._near = MemoryAgent(name)
        self._address = "" if far is not None else _address_of(os.environ.get(_DEVICES, ""))
        self._far: Any = _nixl_agent(name, config) if far is None else far
        self._far_names: set[str] = set()

    def get_reg_descs(self, ranges: Any, memory: str) -> Any:
        return self._far.get_reg_descs(ranges, memory)

    def register_memory(self, ranges: Any, backends: Any = None) -> None:
        """Let other machines read it."""
        self._far.register_memory(ranges)

    def deregister_memory(self, ranges: Any) -> None:
        self._far.deregister_memory(ranges)

    def get_agent_metadata(self) -> bytes:
        """Name this machine, and how it is read from here and from others."""
        near, far = self._near.get_agent_metadata(), self._far.get_agent_metadata()
        return _encoder.encode(_Metadata(machine_id(), near, far, self._address))

    def add_remote_agent(self, metadata: bytes) -> str:
        """Raises msgspec.DecodeError, EngineError, and what NIXL raises."""
        told = _decoder.decode(metadata)
        if machine_id() and told.machine == machine_id():
            return self._near.add_remote_agent(told.near)
        if told.address and told.address == self._address:
            # A bridge of containers, mostly, which has the same address on every machine: it would read from itself.
            raise EngineError(f"both machines have the address {told.address} in the network for KV")
        added = self._far.add_remote_agent(told.far)
        name: str = added.decode() if isinstance(added, bytes) else added
        self._far_names.add(name)
        return name

    def remove_remote_agent(self, name: str) -> None:
        if name in self._far_names:
            self._far_names.discard(name)
            self._far.remove_remote_agent(name)
        else:
            self._near.remove_remote_agent(name)

    def check_remote_metadata(self, name: str) -> bool:
        """Whether it is worth while to read from there again."""
        agent = self._far if name in self._far_names else self._near
        return bool(agent.check_remote_metadata(name))

    def get_xfer_descs(self, blocks: Any, memory: str) -> tuple[Any, str]:
        return blocks, memory

    def prep_xfer_dlist(self, name: str, blocks: tuple[Any, str]) -> _Lists:
        near = far = None
        if name not in self._far_names:
            near = self._near.prep_xfer_dlist(name, self._near.get_xfer_descs(*blocks))
        if name in self._far_names or name == HERE:
            far = self._far.prep_xfer_dlist(name, self._far.get_xfer_descs(*blocks))
        return _Lists(near, far)

    def release_dlist_handle(self, blocks: _Lists) -> None:
        if blocks.far is not None:
            self._far.release_dlist_handle(blocks.far)

    def make_prepped_xfer(
        self, operation: str, local: _Lists, local_indices: Any, remote: _Lists, remote_indices: Any
    ) -> _EitherTransfer:
        if remote.far is None:
            lists = (local.near, local_indices, remote.near, remote_indices)
            return _EitherTransfer(self._near, self._near.make_prepped_xfer(operation, *lists))
        lists = (local.far, local_indices, remote.far, remote_indices)
        return _EitherTransfer(self._far, self._far.make_prepped_xfer(operation, *lists))

    def transfer(self, transfer: _EitherTransfer) -> str:
        """Raises EngineError, and what NIXL raises."""
        state: str = transfer.agent.transfer(transfer.handle)
        return state

    def check_xfer_state(self, transfer: _EitherTransfer) -> str:
        """Of transfers from other machines, which do not end with `transfer`."""
        state: str = transfer.agent.check_xfer_state(transfer.handle)
        return state

    def release_xfer_handle(self, transfer: _EitherTransfer) -> None:
        transfer.agent.release_xfer_handle(transfer.handle)


def _address_of(device: str) -> str:
    """Empty for devices that are no network interfaces, and for several."""
    return str(interfaces().get(device, ""))


def _nixl_agent(name: str, config: object) -> Any:
    api: Any = importlib.import_module("nixl._api")
    return api.nixl_agent(name, config or api.nixl_agent_config(capture_telemetry=True))


# Reads of KV in a thread of their own, beside the one in which the engine's steps run.
#
# NIXL's agent says that posting a read is asynchronous, and on GPUs it is. In ordinary memory the call that posts a
# read copies all of it. So the steps make none while anything is read.

_LOOK_EVERY_S = 0.001
"""Interval of looks at reads that have been posted and have not ended."""

_END_S = 2.0
"""Time for a copy under way to end when the process ends."""


@dataclass(eq=False)
class Read:
    """Stand in for NIXL's handle of a transfer."""

    blocks: tuple[Any, ...]
    """Arguments of `make_prepped_xfer`."""
    handle: Any = None
    """NIXL's handle, from when the read is posted until it has succeeded."""
    unwanted: bool = False
    done: bool = False
    error: Exception | None = None


class ReaderThread:
    """Agent, NIXL's or ours, whose `transfer` only says what is to be transferred, and whose `check_xfer_state` only
    looks.

    `prepare` is called in the thread before every read. The thread starts with the first one.
    """

    def __init__(self, agent: Any, prepare: Callable[[], None]) -> None:
        self._agent = agent
        self._prepare = prepare
        self._queue: SimpleQueue[Read | None] = SimpleQueue()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._closing = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def make_prepped_xfer(self, *blocks: Any, notif_msg: bytes = b"") -> Read:
        """Make a read. No process is notified: the source holds nothing in the name of a request."""
        return Read(blocks)

    def transfer(self, read: Read) -> str:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="reader", daemon=True)
            self._thread.start()
        self._queue.put(read)
        return "PROC"

    def check_xfer_state(self, read: Read) -> str:
        """Raises what NIXL raised."""
        if read.error is not None:
            raise read.error
        return "DONE" if read.done else "PROC"

    def get_xfer_telemetry(self, read: Read) -> None:
        """Return nothing: telemetry is not used."""

    def release_xfer_handle(self, read: Read) -> None:
        """Raises what NIXL does if the transfer has not ended and cannot be taken back."""
        read.unwanted = True
        if read.handle is not None:
            self._agent.release_xfer_handle(read.handle)

    def give_up(self, reads: Iterable[Any]) -> None:
        """Keep reads from being posted that are not yet. They end soon."""
        for read in reads:
            read.unwanted = True

    def wait(self, timeout_s: float) -> None:
        """Wait until a read has ended since the last call, for `timeout_s` at most."""
        self._ended.wait(timeout_s)
        self._ended.clear()

    def close(self) -> None:
        """Post no further read, and wait for the copy under way."""
        self._closing = True
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(_END_S)

    def _run(self) -> None:
        posted: list[Read] = []
        while True:
            try:
                read = self._queue.get(timeout=_LOOK_EVERY_S if posted else None)
            except Empty:
                pass
            else:
                if read is None or self._closing:
                    return
                posted.append(read)
            posted = [read for read in posted if not self._ends(read)]

    def _ends(self, read: Read) -> bool:
        """Post it if it is new, and look whether it has ended."""
        try:
            state = self._post(read) if read.handle is None else self._agent.check_xfer_state(read.handle)
            if state == "PROC":
                return False
            if state != "DONE":
                raise EngineError("NIXL says that the read has failed")
            if read.handle is not None:
                self._agent.release_xfer_handle(read.handle)
                read.handle = None
            read.done = True
        except Exception as error:  # noqa: BLE001  # check_xfer_state raises it
            read.error = error
        self._ended.set()
        return True

    def _post(self, read: Read) -> str:
        if read.unwanted:
            return "DONE"
        self._prepare()
        read.handle = self._agent.make_prepped_xfer(*read.blocks)
        state: str = self._agent.transfer(read.handle)
        return state
