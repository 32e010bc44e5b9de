"""Tells processes that are silent because they wait for CPU time from processes that are gone or hang."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.process.run_queue import ThreadTimes, shares_between
from state.machine.identity import machine_id
from state.machine.processes import start_time
from state.machine.threads import times_of_all

_log = logging.getLogger(__name__)

_STARVED = 0.5
"""A process is starved if its threads have waited for a core for this share of the time since the last look."""
_LASTS_S = 1.0
"""A process counts as starved for so long after such a look. After a moment on a core, its next wait shows late."""


@dataclass(frozen=True)
class _Seen:
    at: float
    started: int
    threads: Mapping[int, ThreadTimes]
    starved_until: float = -math.inf


class Starvation:
    """Follows silent processes from look to look. A process that is gone, a zombie, stopped or asleep is not starved,
    nor is one that has got the pid of a dead process meanwhile."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[str, _Seen] = {}

    def look(self, silent: Iterable[Presence]) -> frozenset[str]:
        """Return the leases of those that are starved. Costs nothing while no process is silent. A pid of another
        machine says nothing here."""
        looks = ((presence, self._look(presence)) for presence in silent if presence.machine in ("", machine_id()))
        self._seen = {presence.lease: seen for presence, seen in looks if seen is not None}
        return frozenset(lease for lease, seen in self._seen.items() if seen.at <= seen.starved_until)

    def _look(self, presence: Presence) -> _Seen | None:
        started, now = start_time(presence.pid), self._clock()
        if started is None:
            return None
        threads, before = times_of_all([presence.pid]), self._seen.get(presence.lease)
        if before is None:
            return _Seen(now, started, threads)
        if started != before.started:
            return replace(before, starved_until=-math.inf)
        seconds = now - before.at
        if shares_between(before.threads, threads, seconds).waited_s < _STARVED * seconds:
            return _Seen(now, started, threads, before.starved_until)
        if before.starved_until < before.at:
            _log.warning("%s is silent: it waits for CPU time that other processes have", presence.watcher)
        return _Seen(now, started, threads, now + _LASTS_S)
