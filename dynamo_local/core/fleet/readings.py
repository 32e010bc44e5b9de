"""Validates the load that a worker reports: complete, finite and recent, or unknown. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dynamo_local.core.messages.presence import Load
from dynamo_local.core.priority.classes import PriorityClass

STALE_S = 10.0
"""A load older than this is unknown: the engine may hang. Longer than any sensible engine step."""


@dataclass(frozen=True)
class Reading:
    """A valid load. `kv_usage`: share of KV blocks that requests use, 0 to 1, without blocks only pinned for readers.
    `age_s`: time since the measurement. `head_tokens`: see Load, `prefill_s`: see Counts; None is unknown.
    `head_age_s`: for how long the first waiting request has been that. `urgent`: running requests of the class high, as
    far as the worker tells."""

    running: int
    waiting: int
    kv_usage: float
    age_s: float
    head_tokens: int | None = None
    prefill_s: float | None = None
    head_age_s: float | None = None
    urgent: int = 0


def reading_of(load: Load | None, now: float, prefill_s: float | None = None) -> Reading | None:
    """A load as a reading; None if a part is missing, or it is stale. `prefill_s` comes from the same presence."""
    if load is None or load.running is None or load.waiting is None or load.kv_usage is None or load.at is None:
        return None
    if not (math.isfinite(load.kv_usage) and math.isfinite(load.at)):
        # Every comparison with NaN is false: one such value would silently stop all scaling.
        return None
    age_s = max(0.0, now - load.at)
    if age_s > STALE_S:
        return None
    # Some engines report no head_tokens when no request waits; then it is known to be 0.
    head_tokens = 0 if load.waiting == 0 else load.head_tokens
    head_age_s = None if load.head_since is None else max(0.0, now - load.head_since)
    urgent = sum(each.requests for each in load.by_class or () if each.priority_class == PriorityClass.HIGH)
    return Reading(load.running, load.waiting, load.kv_usage, age_s, head_tokens, prefill_s, head_age_s, urgent)
