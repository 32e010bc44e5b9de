"""Agents of engines that compute in ordinary memory and are read by other machines as well: KV of this machine is
copied from the other process' memory (memory_agent.py), KV of others is read by NIXL or on a stream (stream/).

NIXL's transport (UCX) has neither authentication nor encryption. It listens on the interface of the network that the
admin has declared closed, and on no other.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import msgspec

from dynamo_local.core.errors import EngineError
from dynamo_local.engine.vllm.environment import IMPORT_DEFAULTS
from dynamo_local.engine.vllm.kv.memory_agent import HERE, MemoryAgent
from state.machine.identity import machine_id
from state.machine.interfaces import interfaces

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
class _Transfer:
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
    ) -> _Transfer:
        if remote.far is None:
            lists = (local.near, local_indices, remote.near, remote_indices)
            return _Transfer(self._near, self._near.make_prepped_xfer(operation, *lists))
        lists = (local.far, local_indices, remote.far, remote_indices)
        return _Transfer(self._far, self._far.make_prepped_xfer(operation, *lists))

    def transfer(self, transfer: _Transfer) -> str:
        """Raises EngineError, and what NIXL raises."""
        state: str = transfer.agent.transfer(transfer.handle)
        return state

    def check_xfer_state(self, transfer: _Transfer) -> str:
        """Of transfers from other machines, which do not end with `transfer`."""
        state: str = transfer.agent.check_xfer_state(transfer.handle)
        return state

    def release_xfer_handle(self, transfer: _Transfer) -> None:
        transfer.agent.release_xfer_handle(transfer.handle)


def _address_of(device: str) -> str:
    """Empty for devices that are no network interfaces, and for several."""
    return str(interfaces().get(device, ""))


def _nixl_agent(name: str, config: object) -> Any:
    api: Any = importlib.import_module("nixl._api")
    return api.nixl_agent(name, config or api.nixl_agent_config(capture_telemetry=True))
