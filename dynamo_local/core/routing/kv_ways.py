"""How KV gets from one worker to another. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from dynamo_local.core.fleet.view import ENGINE_ROLES
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.names import parse_watcher
from dynamo_local.core.routing.pulling import transfers


class KvWays(msgspec.Struct, frozen=True):
    """For a worker, the numbers of other workers of its model whose KV it reads from their memory, as on one machine
    (`local`), and whose KV it computes anew: on another machine the end of a pin could not be told, or an engine
    transfers none."""

    local: int
    computed_anew: int


def ways_of_kv(presences: Iterable[Presence]) -> dict[str, KvWays]:
    """The ways to each worker, by watcher. Each watcher has one presence."""
    workers = [(parse_watcher(each.watcher).revision, each) for each in presences if each.role in ENGINE_ROLES]
    together = Counter(revision for revision, _ in workers)
    lending = Counter((revision, each.machine) for revision, each in workers if _lends(each))
    ways: dict[str, KvWays] = {}
    for revision, each in workers:
        local = lending[revision, each.machine] - 1 if _lends(each) else 0
        ways[each.watcher] = KvWays(local, together[revision] - 1 - local)
    return ways


def _lends(worker: Presence) -> bool:
    """Whether a worker lends and pulls KV on its machine. One that is not known is shared with nobody."""
    return bool(worker.machine) and transfers(worker)
