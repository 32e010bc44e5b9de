"""What a worker says of its load, if that can be relied on. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dynamo_local.core.messages.presence import Load

STALE_S = 10.0
"""A worker's reading older than this says nothing any more: its engine may hang. Longer than any sensible step."""


@dataclass(frozen=True)
class Reading:
    """A worker's load. `kv_usage`: share of KV blocks that its requests use, 0 to 1; blocks that are only pinned for
    readers are not in it. `age_s`: since it was measured. `head_tokens`: see Load, `prefill_s`: see Counts;
    None is unknown."""

    running: int
    waiting: int
    kv_usage: float
    age_s: float
    head_tokens: int | None = None
    prefill_s: float | None = None


def reading_of(load: Load | None, now: float, prefill_s: float | None = None) -> Reading | None:
    """The load as a reading; None if a part of it was not measured, or it is stale. `prefill_s` was told with it."""
    if load is None or load.running is None or load.waiting is None or load.kv_usage is None or load.at is None:
        return None
    if not (math.isfinite(load.kv_usage) and math.isfinite(load.at)):
        # Every comparison with NaN is false: it would stop all scaling without a word.
        return None
    age_s = max(0.0, now - load.at)
    if age_s > STALE_S:
        return None
    # Where nothing waits, nothing is needed.
    head_tokens = 0 if load.waiting == 0 else load.head_tokens
    return Reading(load.running, load.waiting, load.kv_usage, age_s, head_tokens, prefill_s)
