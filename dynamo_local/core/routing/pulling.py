"""Whether a prefix is better pulled from another worker than computed. Pure."""

from __future__ import annotations

from dynamo_local.core.messages.presence import Presence

_LEAST_TOKENS = 512
"""Pulling costs a round trip, and a step of each engine that is under way, however short the prefix is. From here on it
was faster everywhere it was measured: docs/internals/results/disaggregation.md has our figures for CPUs; on an H200,
2,000 tokens were pulled in 35 ms and computed in 78 (llm-d, p2p sharing, August 2026)."""

PULL_TO_COMPUTE = 0.5
"""Time of a pull to that of computing the same tokens, at most: 0.17 on our CPUs with real vLLM, 0.45 on that H200."""

_LEAST_FAR_TOKENS = 2048
"""The same from another machine, where a pull costs two round trips more and its bytes cross a network. With 50 ms to
another network namespace, a pull of 512 tokens cost twice as much as computing them, of 2,048 half as
much (docs/internals/results/machines.md); not measured between real machines."""


def is_worth_pulling(tokens: int, source: Presence | None, reader: Presence | None) -> bool:
    """Whether `reader` is to pull so many tokens, which it lacks, from `source`."""
    if source is None or reader is None or not (transfers(source) and transfers(reader)):
        return False
    # Also on one machine: where one of the two is in a network for KV, their engines have different fingerprints.
    if kv_network(source) != kv_network(reader):
        return False
    if source.machine == reader.machine:
        return tokens >= _LEAST_TOKENS
    known = source.machine and reader.machine
    return bool(known and kv_network(source)) and tokens >= _LEAST_FAR_TOKENS


def kv_network(worker: Presence) -> str:
    """The closed network in which a worker reads KV of other machines, or TLS_STREAM. Empty: it reads none."""
    return "" if worker.engine is None else worker.engine.kv_network


def transfers(worker: Presence | None) -> bool:
    """Whether a worker lends and pulls KV."""
    return worker is not None and worker.engine is not None and worker.engine.no_transfer is None
