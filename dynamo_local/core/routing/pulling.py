"""Whether a prefix is better pulled from another worker than computed. Pure."""

from __future__ import annotations

from dynamo_local.core.messages.presence import Presence

_LEAST_TOKENS = 512
"""Pulling costs a round trip, and a step of each engine that is under way, however short the prefix is. From here on it
was faster everywhere it was measured: docs/internals/results/disaggregation.md has our figures for CPUs; on an H200,
2,000 tokens were pulled in 35 ms and computed in 78 (llm-d, p2p sharing, August 2026)."""


_LEAST_FAR_TOKENS = 2048
"""The same from another machine, where a pull costs two round trips and its bytes cross a network. Not measured between
machines."""


def is_worth_pulling(tokens: int, source: Presence | None, reader: Presence | None) -> bool:
    """Whether `reader` is to pull so many tokens, which it lacks, from `source`."""
    if source is None or reader is None or not (transfers(source) and transfers(reader)):
        return False
    if source.machine == reader.machine:
        return tokens >= _LEAST_TOKENS
    return tokens >= _LEAST_FAR_TOKENS and network_between(source, reader) is not None


def network_between(one: Presence, other: Presence) -> str | None:
    """The closed network in which two workers on different machines read each other's KV; None: it is computed anew."""
    networks = {worker.engine.kv_network if worker.engine is not None else "" for worker in (one, other)}
    known = one.machine and other.machine
    return next(iter(networks)) or None if known and len(networks) == 1 else None


def transfers(worker: Presence | None) -> bool:
    """Whether a worker lends and pulls KV."""
    return worker is not None and worker.engine is not None and worker.engine.no_transfer is None
