"""Utility methods that parking adds to vLLM's engine core (parking.py)."""

from __future__ import annotations


def let_engines_park() -> None:
    """Set the methods on the engine core's class, in this process and in those forked from it: vLLM looks utility
    methods up by name, and offers no registry."""
    from vllm.v1.engine.core import EngineCore

    from dynamo_local.engine.vllm import parking
    from dynamo_local.engine.vllm.patches.check import applies

    if not applies(parking.PATCH):
        return
    setattr(EngineCore, parking.name_of("park"), parking.park_core)
    setattr(EngineCore, parking.name_of("wake"), parking.wake_core)
