"""Whether a prefix is better pulled from another worker than computed. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from dynamo_local.core.fleet.view import ENGINE_ROLES
from dynamo_local.core.messages.kv import TLS_STREAM, Between, KvWays
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


# How KV gets from one worker to another. Pure.


def ways_of_kv(presences: Iterable[Presence]) -> dict[str, KvWays]:
    """The ways to each worker, by watcher. Each watcher has one presence."""
    workers = [(each.revision, each) for each in presences if each.role in ENGINE_ROLES]
    together = Counter(revision for revision, _ in workers)
    here = Counter((revision, each.machine) for revision, each in workers)
    near = Counter((revision, each.machine, kv_network(each)) for revision, each in workers if _lends(each))
    reachable = Counter((revision, kv_network(each)) for revision, each in workers if _lends(each))
    ways: dict[str, KvWays] = {}
    for revision, each in workers:
        network = kv_network(each) if _lends(each) else ""
        beside = near[revision, each.machine, network]
        local = beside - 1 if _lends(each) else 0
        far = reachable[revision, network] - beside if network else 0
        between = _between(network)
        elsewhere = together[revision] - (here[revision, each.machine] if each.machine else 1)
        ways[each.watcher] = KvWays(local, together[revision] - 1 - local - far, far, between, elsewhere)
    return ways


def _between(network: str) -> Between:
    if network == TLS_STREAM:
        return "TLS"
    return "closed network" if network else "recomputed"


def _lends(worker: Presence) -> bool:
    """Whether a worker lends and pulls KV on its machine. One that is not known is shared with nobody."""
    return bool(worker.machine) and transfers(worker)
