"""NIXL agents whose progress thread sleeps while there is nothing to do.

NIXL's Python package makes every agent's progress thread poll without pause, and has no parameter for it: each
engine would keep one core busy for as long as it lives, idle or not. (Seen on a machine with two cores: decode steps
became several times longer.) A thread is needed all the same: without it, an idle engine could not be connected to.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PROGRESS_TIMEOUT_US = 100_000
"""The thread sleeps in poll(2) and is woken by what it waits for; this is for what nothing wakes it for. Each time it
ends, the thread goes through all that the engine's process has open to others: 5 ms cost 0.8 % of a core."""


@contextmanager
def sleeping_progress_threads() -> Iterator[None]:
    """Agents made within have such a thread."""
    api: Any = importlib.import_module("nixl._api")
    original = api.nixlBind
    api.nixlBind = _Bindings(original)
    try:
        yield
    finally:
        api.nixlBind = original


class _Bindings:
    """NIXL's bindings but for one function."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def nixlAgent(self, name: str, config: Any) -> Any:  # noqa: N802  # NIXL's name
        config.pthrDelay = PROGRESS_TIMEOUT_US
        # vLLM makes connections in a thread of its own.
        config.syncMode = self._original.NIXL_THREAD_SYNC_STRICT
        return self._original.nixlAgent(name, config)
