"""What any schedule of turns needs at least, and what one does that knows all arrivals."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from benchmarks.endpoints.turn_world import Arrival, Policy, World
from dynamo_local.core.endpoints.turns import Contender, Limits, Turns, take_turns

_NEVER = 1e9
_PRICES = 24
_STAYS_S = (0.0, 0.5, 1.0, 2.0, 4.0)
"""How far ahead a schedule that knows the arrivals looks for the next request of an endpoint before it swaps."""


def least_swaps(world: World, arrivals: Sequence[Arrival], wait_s: float) -> float:
    """A lower bound on the swaps of every schedule in which no request waits longer than `wait_s`, however it is found.

    Each endpoint alone: its requests in order of arrival are divided into stays on a device, each of which costs one
    swap and lasts at least a start and, from the last moment at which its first request may begin, until its last one
    comes. All stays together have no more than the time of all devices: that is relaxed by a price of time
    (Lagrange), so that the bound holds for every price, and the best is taken. That two stays cannot be on a device at
    once, and how long requests run, is left out: the true least number is higher.
    """
    times = _times(arrivals)
    total_s = world.devices * (max((one.at + one.runs_s for one in arrivals), default=0.0) + wait_s)

    def bound(price: float) -> float:
        return sum(_stays(each, wait_s, world.start_s, price) for each in times.values()) - price * total_s

    low, high = 0.0, 1.0
    for _ in range(_PRICES):
        left, right = low + (high - low) / 3, high - (high - low) / 3
        # The bound is concave in the price.
        low, high = (left, high) if bound(left) < bound(right) else (low, right)
    return max(bound(0.0), bound(low))


def _stays(times: Sequence[float], wait_s: float, start_s: float, price: float) -> float:
    """The least cost of one endpoint's stays: 1 and the price of its time for each."""
    costs = [0.0]
    for last, ends in enumerate(times):
        costs.append(
            min(
                costs[first] + 1 + price * (start_s + max(0.0, ends - times[first] - wait_s))
                for first in range(last + 1)
            )
        )
    return costs[-1]


def clairvoyant(arrivals: Iterable[Arrival], limits: Limits, stays_s: float = 0.0) -> Policy:
    """A policy that knows all arrivals: of the endpoints without a request the one yields whose next request is
    furthest away, and none whose next one comes within `stays_s`."""
    times = _times(arrivals)

    def decide(contenders: Sequence[Contender], free: dict[int, float], now: float) -> Turns:
        return take_turns([_knowing(each, times, now, stays_s) for each in contenders], free, now, limits)

    return decide


def fewest_swaps(world: World, arrivals: Sequence[Arrival], wait_s: float, turn_s: float) -> int | None:
    """The fewest swaps of the schedules tried that know all arrivals and let nobody wait longer than `wait_s`; None:
    each has somebody wait longer."""
    found = []
    for stays_s in _STAYS_S:
        knowing = World(world.endpoints, world.devices, world.start_s, world.end_s)
        knowing.policy = clairvoyant(arrivals, Limits(turn_s, 0.0), stays_s)
        outcome = knowing.run(arrivals)
        if max(outcome.waits) <= wait_s:
            found.append(len(outcome.swaps))
    return min(found, default=None)


def _knowing(each: Contender, times: Mapping[str, list[float]], now: float, stays_s: float) -> Contender:
    if each.idle_since is None:
        return each
    mine = times.get(each.name, [])
    index = bisect_right(mine, now)
    following = mine[index] if index < len(mine) else _NEVER
    # The one that has been without requests for longest yields first.
    return replace(each, idle_since=None if following - now <= stays_s else -following)


def _times(arrivals: Iterable[Arrival]) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {}
    for one in sorted(arrivals):
        times.setdefault(one.endpoint, []).append(one.at)
    return times
