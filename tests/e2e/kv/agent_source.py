"""A process from whose memory an agent of the kind that it is told reads. Without vLLM, to start at once."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import numpy as np

from dynamo_local.engine.vllm.kv.agents import MemoryAgent, NetworkAgent, bind_transport
from dynamo_local.engine.vllm.kv.stream.agent import StreamAgent
from dynamo_local.engine.vllm.patches.tuning import sleeping_progress_threads

PIECE, COUNT = 4096, 64
SAID = r"[0-9a-f]+ \d+\n"
"""What a source says: its metadata, and the address of its memory."""


def agent_of(kind: str, name: str, device: str = "lo", host: str = "127.0.0.1") -> Any:
    """An agent as the connector has it: "nixl", "memory", "network" or "stream". The last two are for other machines
    that reach the interface `device`, which has the address `host`."""
    if kind == "memory":
        return MemoryAgent(name)
    if kind == "stream":
        return NetworkAgent(name, far=StreamAgent(host, lambda: None))
    if kind == "network":
        bind_transport(device, only_tcp=True)
        with sleeping_progress_threads():
            return NetworkAgent(name)
    api: Any = importlib.import_module("nixl._api")
    with sleeping_progress_threads():
        return api.nixl_agent(name, api.nixl_agent_config(num_threads=0, capture_telemetry=True))


def pieces(address: int, size: int = PIECE) -> Any:
    """Rows of address, length and device."""
    rows = np.zeros((COUNT, 3), dtype=np.uint64)
    rows[:, 0], rows[:, 1] = address + np.arange(COUNT, dtype=np.uint64) * np.uint64(size), size
    return rows


def lend(kind: str, size: str = str(PIECE), *where: str) -> None:
    """Say where there is memory of which each piece, of this size, is full of its number, and wait."""
    agent = agent_of(kind, "source", *where)
    memory = np.repeat(np.arange(COUNT, dtype=np.uint8), int(size))
    agent.register_memory(agent.get_reg_descs([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM"))
    print(agent.get_agent_metadata().hex(), memory.ctypes.data, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    lend(*sys.argv[1:])
