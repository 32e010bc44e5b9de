"""Agents of our own in the place of NIXL's, for engines on a CPU: those that copy from other processes' memory
(kv/memory_agent.py), and those that are read by other machines as well (kv/network_agent.py), by NIXL or on a stream
(kv/stream)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dynamo_local.engine.vllm.kv.memory_agent import MemoryAgent
from dynamo_local.engine.vllm.kv.network_agent import NetworkAgent


@contextmanager
def memory_agents() -> Iterator[None]:
    """Give connectors of vLLM that are made within an agent that reads on this machine instead of NIXL's."""
    with _agents(MemoryAgent):
        yield


@contextmanager
def network_agents() -> Iterator[None]:
    """Give connectors of vLLM that are made within an agent that reads on other machines as well instead of NIXL's."""
    with _agents(NetworkAgent):
        yield


@contextmanager
def stream_agents(host: str, prepare: Callable[[], None]) -> Iterator[None]:
    """The same with an agent that reads on other machines by streams, and serves them at this address. `prepare` is
    called in each thread of its own. Making one raises EngineError if it cannot listen there."""

    # Imported here: what makes certificates takes a while to import.
    from dynamo_local.engine.vllm.kv.stream.agent import StreamAgent

    def made(name: str, config: object = None) -> NetworkAgent:
        return NetworkAgent(name, config, StreamAgent(host, prepare))

    with _agents(made):
        yield


@contextmanager
def _agents(kind: Callable[..., Any]) -> Iterator[None]:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker

    module: Any = base_worker
    original = module.NixlWrapper
    module.NixlWrapper = kind
    try:
        yield
    finally:
        module.NixlWrapper = original
