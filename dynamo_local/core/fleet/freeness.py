"""Llumnix's freeness: for how many more steps a worker's batch can run before its KV cache is full.

F = (M - sum V) / B: M the size of the KV cache, V the virtual usage of each request, B the number of running
requests. What a request counts for (Llumnix, OSDI'24, section 4.4):

    running               what it uses, and its share of the headroom of its priority class
    first in the queue    all that it will need, so that a worker that cannot take it looks full
    further back          nothing
    on a worker that ends infinitely much, so that nothing is given to it and everything moves away

Sizes are in tokens, so that F is in steps. It is negative where requests queue for room that there is not. Routing,
scaling and rebalancing go by the same figure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dynamo_local.core.fleet.readings import reading_of
from dynamo_local.core.messages.presence import Presence

NO_HEADROOM: Mapping[int, float] = {}


@dataclass(frozen=True)
class Usage:
    """One running request, or many of the same priority together: `tokens` of KV cache."""

    tokens: float
    priority: int = 0
    requests: float = 1.0


@dataclass(frozen=True)
class Instance:
    """A worker. `kv_tokens`: size of its KV cache. `head_tokens`: what the first request of its queue will need, 0 if
    none waits. `terminating`: it takes nothing any more."""

    kv_tokens: float
    running: Sequence[Usage] = field(default_factory=tuple)
    head_tokens: float = 0.0
    terminating: bool = False

    @property
    def used(self) -> float:
        """Tokens of its KV cache that requests use."""
        return math.fsum(usage.tokens for usage in self.running)

    @property
    def batch(self) -> float:
        """Requests that run."""
        return math.fsum(usage.requests for usage in self.running)


def virtual_usage(instance: Instance, headroom: Mapping[int, float] = NO_HEADROOM) -> float:
    """Sum of all V, in tokens. `headroom`: by priority, tokens that are kept free for the requests of that class; those
    of a class share it."""
    if instance.terminating:
        return math.inf
    # A class whose requests run is given its headroom once, however many they are.
    classes = Counter(usage.priority for usage in instance.running if usage.requests > 0)
    kept = math.fsum(headroom.get(priority, 0.0) for priority in classes)
    return math.fsum((instance.used, kept, instance.head_tokens))


def freeness(instance: Instance, headroom: Mapping[int, float] = NO_HEADROOM) -> float:
    """F, in steps. A worker without requests counts as one with a batch of one."""
    return (instance.kv_tokens - virtual_usage(instance, headroom)) / max(instance.batch, 1.0)


def measured(kv_tokens: float, kv_usage: float, running: float, head_tokens: float) -> Instance:
    """A worker of which only totals are known."""
    return Instance(kv_tokens, (Usage(kv_usage * kv_tokens, requests=running),), head_tokens)


def instance_of(worker: Presence, now: float, change: Usage | None = None) -> Instance | None:
    """A worker as its presence tells of it; None if its load is not known. `change`: what requests that come there, or
    leave, will change, and is not in that load yet; negative for those that leave."""
    engine, reading = worker.engine, reading_of(worker.load, now)
    if engine is None or reading is None or reading.head_tokens is None:
        return None
    told = measured(engine.kv_blocks * engine.block_size, reading.kv_usage, reading.running, reading.head_tokens)
    instance = replace(told, terminating=worker.state == "draining")
    return instance if change is None else with_more(instance, change)


def with_more(instance: Instance, usage: Usage) -> Instance:
    """The worker with this besides; with less than before, if it is negative."""
    return replace(instance, running=(*instance.running, usage))


def freest(
    candidates: Iterable[Presence], changes: Mapping[str, Usage], now: float, avoid: str | None = None
) -> Presence | None:
    """The freest worker; None if there is none. `changes`: see `instance_of`, by lease.

    Those whose load is not known, and `avoid`, a lease, are taken only if there is nobody else. Workers that have not
    told of their engine are no candidates.
    """

    def rank(worker: Presence) -> tuple[bool, float, str]:
        instance = instance_of(worker, now, changes.get(worker.lease))
        return worker.lease != avoid, -math.inf if instance is None else freeness(instance), worker.watcher

    return max((worker for worker in candidates if worker.engine is not None), key=rank, default=None)
