"""A process from whose memory an agent of the kind that it is told reads. Without vLLM, to start at once."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import numpy as np

from dynamo_local.engine.vllm.kv.memory_agent import MemoryAgent
from dynamo_local.engine.vllm.kv.network_agent import NetworkAgent, bind_transport
from dynamo_local.engine.vllm.patches.tuning.nixl_threads import sleeping_progress_threads

PIECE, COUNT = 4096, 64


def agent_of(kind: str, name: str) -> Any:
    """An agent as the connector has it: "nixl", "memory" or "network"."""
    if kind == "memory":
        return MemoryAgent(name)
    if kind == "network":
        bind_transport("lo", only_tcp=True)
        with sleeping_progress_threads():
            return NetworkAgent(name)
    api: Any = importlib.import_module("nixl._api")
    with sleeping_progress_threads():
        return api.nixl_agent(name, api.nixl_agent_config(num_threads=0, capture_telemetry=True))


def lend(kind: str) -> None:
    """Say where there is memory of which each piece is full of its number, and wait."""
    agent = agent_of(kind, "source")
    memory = np.repeat(np.arange(COUNT, dtype=np.uint8), PIECE)
    agent.register_memory(agent.get_reg_descs([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM"))
    print(agent.get_agent_metadata().hex(), memory.ctypes.data, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    lend(sys.argv[1])
