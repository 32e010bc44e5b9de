"""Freeness after Llumnix: the number of steps that a worker's batch can run before its KV cache is full. Pure.

F = (M - sum V) / B, with M the size of the KV cache, V the virtual usage of each request, B the number of running
requests. The virtual usage (Llumnix, OSDI'24, section 4.4) of a request that is

    running               its usage, and its share of the headroom of its priority class
    first in the queue    all that it will need, so that a worker that cannot admit it looks full
    further back          0
    on a worker that ends infinite, so that the worker is assigned no requests and its own migrate

Sizes are in tokens, so that F is in steps. F is negative where waiting requests need more room than there is. Scaling
and rebalancing use the same figure.
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
    """KV cache used by a running request, or by `requests` of the same priority together, in tokens."""

    tokens: float
    priority: int = 0
    requests: float = 1.0


@dataclass(frozen=True)
class Instance:
    """A worker. `kv_tokens`: size of its KV cache. `head_tokens`: need of the first waiting request, 0 if none waits.
    `terminating`: whether the worker is ending, and takes no requests."""

    kv_tokens: float
    running: Sequence[Usage] = field(default_factory=tuple)
    head_tokens: float = 0.0
    terminating: bool = False

    @property
    def used(self) -> float:
        """Part of the KV cache that requests use, in tokens."""
        return math.fsum(usage.tokens for usage in self.running)

    @property
    def batch(self) -> float:
        """Number of running requests."""
        return math.fsum(usage.requests for usage in self.running)


def virtual_usage(instance: Instance, headroom: Mapping[int, float] = NO_HEADROOM) -> float:
    """Sum of V over all requests, in tokens. `headroom`: by priority, tokens kept free for the requests of that class
    together."""
    if instance.terminating:
        return math.inf
    # The headroom of a class counts once, however many of its requests run.
    classes = Counter(usage.priority for usage in instance.running if usage.requests > 0)
    kept = math.fsum(headroom.get(priority, 0.0) for priority in classes)
    return math.fsum((instance.used, kept, instance.head_tokens))


def freeness(instance: Instance, headroom: Mapping[int, float] = NO_HEADROOM) -> float:
    """F, in steps. The batch of a worker without requests counts as 1."""
    return (instance.kv_tokens - virtual_usage(instance, headroom)) / max(instance.batch, 1.0)


def measured(kv_tokens: float, kv_usage: float, running: float, head_tokens: float) -> Instance:
    """A worker of which only totals are known: `kv_usage` from 0 to 1, the others in tokens and requests."""
    return Instance(kv_tokens, (Usage(kv_usage * kv_tokens, requests=running),), head_tokens)


def instance_of(worker: Presence, now: float, change: Usage | None = None) -> Instance | None:
    """A worker by its presence; None if its load is not known. `change`: usage that this load does not contain yet, of
    requests about to come; negative for requests about to leave."""
    engine, reading = worker.engine, reading_of(worker.load, now)
    if engine is None or reading is None or reading.head_tokens is None:
        return None
    told = measured(engine.kv_blocks * engine.block_size, reading.kv_usage, reading.running, reading.head_tokens)
    instance = replace(told, terminating=worker.state == "draining")
    return instance if change is None else with_more(instance, change)


def with_more(instance: Instance, usage: Usage) -> Instance:
    """The worker with this usage added; a negative one is subtracted."""
    return replace(instance, running=(*instance.running, usage))


def freest(
    candidates: Iterable[Presence], changes: Mapping[str, Usage], now: float, avoid: str | None = None
) -> Presence | None:
    """The worker with the highest freeness; None if there is no candidate. `changes`: see `instance_of`, by lease.

    Workers of unknown load, and the worker with the lease `avoid`, are chosen only if there is no other. Workers whose
    engine is not known are no candidates.
    """

    def rank(worker: Presence) -> tuple[bool, float, str]:
        instance = instance_of(worker, now, changes.get(worker.lease))
        return worker.lease != avoid, -math.inf if instance is None else freeness(instance), worker.watcher

    return max((worker for worker in candidates if worker.engine is not None), key=rank, default=None)
