"""NIXL agents whose progress thread sleeps while there is nothing to do.

NIXL's Python package makes every agent's progress thread poll without a pause, and has no parameter for it: each
engine would keep one core busy for as long as it lives, idle or not. (On a machine with two cores, decode steps became
several times longer.) A thread is needed all the same: without it, an idle engine could not be connected to.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dynamo_local.engine.vllm.patches.check import applies

PROGRESS_TIMEOUT_US = 100_000
"""The longest sleep of the thread. Events wake it earlier (poll(2)); with each wake-up it goes through all connections
of the engine's process, and waking up every 5 ms cost 0.8 % of a core."""


@contextmanager
def sleeping_progress_threads() -> Iterator[None]:
    """Give agents that are made within such a thread."""
    if not applies("NIXL's progress threads"):
        yield
        return
    api: Any = importlib.import_module("nixl._api")
    original = api.nixlBind
    api.nixlBind = _Bindings(original)
    try:
        yield
    finally:
        api.nixlBind = original


class _Bindings:
    """Stand in for NIXL's bindings: all of them as they are, except one function."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def nixlAgent(self, name: str, config: Any) -> Any:  # noqa: N802  # NIXL's name
        config.pthrDelay = PROGRESS_TIMEOUT_US
        # vLLM makes connections in a thread of its own.
        config.syncMode = self._original.NIXL_THREAD_SYNC_STRICT
        return self._original.nixlAgent(name, config)
