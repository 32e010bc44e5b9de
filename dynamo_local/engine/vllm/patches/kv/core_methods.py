"""Utility methods that prefix pull adds to vLLM's engine core (kv/core_methods.py)."""

from __future__ import annotations

from dynamo_local.engine.vllm.kv.core_methods import METHODS, name_of


def add_core_methods() -> None:
    """Set the methods on the engine core's class: vLLM looks utility methods up by name, and offers no registry."""
    from vllm.v1.engine.core import EngineCore

    for method, function in METHODS.items():
        setattr(EngineCore, name_of(method), function)
