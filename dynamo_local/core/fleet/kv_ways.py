"""How KV gets from one worker to another. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from dynamo_local.core.fleet.view import ENGINE_ROLES
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.names import parse_watcher


class KvWays(msgspec.Struct, frozen=True):
    """For a worker, the numbers of other workers of its model whose KV it reads from their memory, as on one machine
    (`local`), and whose KV it computes anew: on another machine the end of a pin could not be told, or an engine
    transfers none."""

    local: int
    computed_anew: int


def ways_of_kv(presences: Iterable[Presence]) -> dict[str, KvWays]:
    """The ways to each worker, by watcher."""
    workers = [each for each in presences if each.role in ENGINE_ROLES]
    ways: dict[str, KvWays] = {}
    for worker in workers:
        revision = parse_watcher(worker.watcher).revision
        others = [
            other
            for other in workers
            if other.watcher != worker.watcher and parse_watcher(other.watcher).revision == revision
        ]
        local = sum(_reads(worker, other) for other in others)
        ways[worker.watcher] = KvWays(local, len(others) - local)
    return ways


def _reads(worker: Presence, other: Presence) -> bool:
    """Whether the worker reads the other one's KV. A machine that is not known is shared with nobody."""
    able = (each.engine is not None and each.engine.no_transfer is None for each in (worker, other))
    return all(able) and bool(worker.machine) and worker.machine == other.machine
