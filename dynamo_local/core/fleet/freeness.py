"""Freeness after Llumnix: the number of steps that a worker's batch can run before its KV cache is full. Pure.

F = (M - sum V) / B, with M the size of the KV cache, V the virtual usage of each request, B the number of running
requests. The virtual usage (Llumnix, OSDI'24, section 4.4) of a request that is

    running               its usage, and its share of the headroom of its priority class
    first in the queue    what it will need, growing with the time for which it has been the first, so that a worker
                          that cannot admit it looks full, and a short wait moves nobody
    further back          0
    on a worker that ends infinite, so that the worker is assigned no requests and its own migrate

Sizes are in tokens, so that F is in steps. F is negative where waiting requests need more room than there is. Scaling
and rebalancing use the same figure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from dynamo_local.core.fleet.rates import reading_of
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.priority.classes import PriorityClass

HEADROOM: Mapping[PriorityClass, float] = MappingProxyType({PriorityClass.HIGH: 0.1})
"""Share of the KV cache that is kept free on a worker that runs requests of the class, so that others come to it late,
and leave it early. From simulation (docs/internals/results/routing.md): with 0.5 nearly all workers look full if a
tenth of the requests is urgent, so that requests migrate in vain, and the policy `freeness` spreads them no more."""

HEAD_GROWS_S = 1.0
"""After so many seconds at the head of a queue a request counts with all that it needs."""


@dataclass(frozen=True)
class Usage:
    """KV cache used by a running request, or by `requests` of the same class together, in tokens."""

    tokens: float
    priority_class: PriorityClass = PriorityClass.NORMAL
    requests: float = 1.0


@dataclass(frozen=True)
class Instance:
    """A worker. `kv_tokens`: size of its KV cache. `head_tokens`: need of the first waiting request, 0 if none waits.
    `terminating`: whether the worker is ending, and takes no requests. `head_age_s`: for how long that request has been
    the first; None: not known, and long enough."""

    kv_tokens: float
    running: Sequence[Usage] = field(default_factory=tuple)
    head_tokens: float = 0.0
    terminating: bool = False
    head_age_s: float | None = None

    @property
    def used(self) -> float:
        """Part of the KV cache that requests use, in tokens."""
        return math.fsum(usage.tokens for usage in self.running)

    @property
    def batch(self) -> float:
        """Number of running requests."""
        return math.fsum(usage.requests for usage in self.running)

    def runs(self, one: PriorityClass) -> float:
        """Number of running requests of the class."""
        return math.fsum(usage.requests for usage in self.running if usage.priority_class is one)

    @property
    def virtual_head(self) -> float:
        """Virtual usage of the first waiting request, in tokens."""
        grown = 1.0 if self.head_age_s is None else min(self.head_age_s / HEAD_GROWS_S, 1.0)
        return self.head_tokens * grown


def virtual_usage(instance: Instance, headroom: Mapping[PriorityClass, float] = HEADROOM) -> float:
    """Sum of V over all requests, in tokens. `headroom`: by class, the share of the KV cache that is kept free for the
    requests of that class together."""
    if instance.terminating:
        return math.inf
    # The headroom of a class counts once, however many of its requests run.
    kept = math.fsum(share * instance.kv_tokens for one, share in headroom.items() if instance.runs(one) > 0)
    return math.fsum((instance.used, kept, instance.virtual_head))


def freeness(instance: Instance, headroom: Mapping[PriorityClass, float] = HEADROOM) -> float:
    """F, in steps. The batch of a worker without requests counts as 1."""
    return (instance.kv_tokens - virtual_usage(instance, headroom)) / max(instance.batch, 1.0)


def measured(kv_tokens: float, kv_usage: float, running: float, head_tokens: float, *, urgent: float = 0.0) -> Instance:
    """A worker of which only totals are known: `kv_usage` from 0 to 1, the others in tokens and requests. `urgent`:
    those of the running requests that are of the class high."""
    used, urgent = kv_usage * kv_tokens, min(urgent, running)
    if urgent <= 0:
        return Instance(kv_tokens, (Usage(used, requests=running),), head_tokens)
    theirs = used * urgent / running
    usages = Usage(theirs, PriorityClass.HIGH, urgent), Usage(used - theirs, requests=running - urgent)
    return Instance(kv_tokens, usages, head_tokens)


def instance_of(worker: Presence, now: float, change: Usage | None = None) -> Instance | None:
    """A worker by its presence; None if its load is not known. `change`: usage that this load does not contain yet, of
    requests about to come; negative for requests about to leave."""
    engine, reading = worker.engine, reading_of(worker.load, now)
    if engine is None or reading is None or reading.head_tokens is None:
        return None
    kv_tokens = engine.kv_blocks * engine.block_size
    told = measured(kv_tokens, reading.kv_usage, reading.running, reading.head_tokens, urgent=reading.urgent)
    instance = replace(told, terminating=worker.state == "draining", head_age_s=reading.head_age_s)
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
