"""Whether a prefix is better pulled from another worker than computed. Pure."""

from __future__ import annotations

from dynamo_local.core.messages.presence import Presence

_LEAST_TOKENS = 512
"""Pulling costs a round trip, and a step of each engine that is under way, however short the prefix is. From here on it
was faster everywhere it was measured: docs/internals/results/disaggregation.md has our figures for CPUs; on an H200,
2,000 tokens were pulled in 35 ms and computed in 78 (llm-d, p2p sharing, August 2026)."""


def is_worth_pulling(tokens: int, source: Presence | None, reader: Presence | None) -> bool:
    """Whether `reader` is to pull so many tokens, which it lacks, from `source`. KV is read on one machine alone."""
    if source is None or reader is None or source.machine != reader.machine:
        return False
    return tokens >= _LEAST_TOKENS and transfers(source) and transfers(reader)


def transfers(worker: Presence | None) -> bool:
    """Whether a worker lends and pulls KV."""
    return worker is not None and worker.engine is not None and worker.engine.no_transfer is None
