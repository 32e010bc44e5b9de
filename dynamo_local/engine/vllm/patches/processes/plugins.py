"""What installed packages register as plugins is read once, before the fork, instead of in each process of an engine.

For each group of plugins, Python opens a file of every installed package: 20 ms in the host of a worker, and again in
the process that computes.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib import metadata
from typing import Any

from dynamo_local.engine.vllm.patches.check import applies

GROUPS = ("vllm.general_plugins", "vllm.logits_processors")
"""Groups of plugins that an engine's processes look for."""


def list_plugins_once(groups: Iterable[str] = GROUPS) -> None:
    """Have this process, and those forked from it, keep what they have read of installed packages. Reads these groups
    now."""
    if not applies("plugins that forks inherit"):
        return
    module: Any = metadata
    module.entry_points = cache(metadata.entry_points)
    for group in groups:
        metadata.entry_points(group=group)
