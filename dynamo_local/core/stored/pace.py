"""How many lines of batches may be in flight for a model: many while nobody else asks it, else few. Pure.

The window grows while it is used up, and no request waits at the engines. It shrinks to the least as soon as a request
of people runs or waits: those lines that are in flight then finish, behind them, by the engines' own scheduling.
"""

from __future__ import annotations

from dataclasses import dataclass

LEAST = 1
"""Lines in flight for a model while people ask it, for each worker."""

_GROWTH = 2.0
_KV_FULL = 0.85


@dataclass(frozen=True)
class Room:
    """A model as a frontend sees it. `people`: their requests, which run or wait. `waiting`: requests that wait at
    engines, of whichever class. `kv_usage`: the highest of a worker, 0 to 1. `slots`: requests that all engines run at
    the same time. `frontends`: those that serve it."""

    workers: int
    slots: int
    people: int
    waiting: int
    kv_usage: float
    frontends: int = 1


def next_window(window: int, in_flight: int, room: Room, most: int) -> int:
    """Return how many lines may be in flight, given how many could be and are."""
    least = min(LEAST * room.workers, most)
    if not room.workers:
        return 0
    if room.people:
        return least
    top = max(least, min(most, room.slots))
    if room.waiting or room.kv_usage >= _KV_FULL:
        return max(least, min(window, in_flight, top) * 3 // 4)
    wanted = int(max(window, least) * _GROWTH) if in_flight >= window else window
    return max(least, min(wanted, top))
