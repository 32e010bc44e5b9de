"""How KV gets from one worker to another. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from dynamo_local.core.fleet.view import ENGINE_ROLES
from dynamo_local.core.messages.kv import TLS_STREAM, Between, KvWays
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.names import parse_watcher
from dynamo_local.core.routing.pulling import kv_network, transfers


def ways_of_kv(presences: Iterable[Presence]) -> dict[str, KvWays]:
    """The ways to each worker, by watcher. Each watcher has one presence."""
    workers = [(parse_watcher(each.watcher).revision, each) for each in presences if each.role in ENGINE_ROLES]
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
