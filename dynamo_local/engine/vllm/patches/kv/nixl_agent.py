"""Agents that copy from other processes' memory (kv/memory_agent.py) in the place of NIXL's, for engines on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dynamo_local.engine.vllm.kv.memory_agent import MemoryAgent


@contextmanager
def memory_agents() -> Iterator[None]:
    """Give connectors of vLLM that are made within such an agent instead of NIXL's."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker

    module: Any = base_worker
    original = module.NixlWrapper
    module.NixlWrapper = MemoryAgent
    try:
        yield
    finally:
        module.NixlWrapper = original
