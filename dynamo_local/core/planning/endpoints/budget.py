"""Shares one budget of devices among the workers of all endpoints. Pure.

The rules, in this order:

1. What is not the planner's to change is taken: the graph's own workers, and pools that are `fixed`.
2. Minimums, those of the oldest endpoint first.
3. One worker at a time for the pool that lacks the largest share of what it wants; of equals, for the older endpoint.
   A pool whose next worker does not fit is passed over.

So the shares follow from what is wanted now and not from who came first. An endpoint with more than its share gives
back at once, and others get those devices once they are free: workers that are ending still hold theirs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from dynamo_local.core.planning.endpoints.pools import Pool, exact


@dataclass(frozen=True)
class Share:
    """What a pool gets. `gets`: its share, in workers. `order`: number of workers to order now, at most the share if
    it is an increase."""

    pool: Pool
    gets: int
    order: int


def share(pools: Collection[Pool], devices: int, taken: float) -> tuple[Share, ...]:
    """Return the share of each pool, the oldest endpoint first. The order of `pools` does not matter.

    `devices`: the budget. `taken`: those of them that the graph's own workers have.
    """
    ordered = sorted(pools, key=lambda pool: pool.age)
    mine = [pool for pool in ordered if not pool.fixed]
    left = devices - exact(taken) - sum((pool.takes(pool.ordered) for pool in ordered if pool.fixed), Fraction(0))
    shares = _divided(mine, left)
    orders = _orders(mine, shares, left)
    return tuple(
        Share(pool, pool.ordered, pool.ordered) if pool.fixed else Share(pool, shares[pool], orders[pool])
        for pool in ordered
    )


@dataclass
class _Counting:
    """Workers of each pool so far, of `left` devices. Pools are in the order of their age.

    `held`: workers whose devices the pool has anyway, and which therefore take none.
    """

    left: Fraction
    workers: dict[Pool, int]
    upto: dict[Pool, int]
    held: dict[Pool, int] = field(default_factory=dict)

    def fill(self) -> None:
        """Add workers by the rules 2 and 3."""
        for pool in self.workers:
            while self.workers[pool] < min(pool.minimum, self.upto[pool]) and self._fits(pool):
                self._add(pool)
        while short := [p for p, number in self.workers.items() if number < self.upto[p] and self._fits(p)]:
            # The first of equals, which is the oldest.
            self._add(max(short, key=lambda pool: pool.unmet(self.workers[pool])))

    def _fits(self, pool: Pool) -> bool:
        return self._cost(pool) <= max(self.left, Fraction(0))

    def _add(self, pool: Pool) -> None:
        self.left -= self._cost(pool)
        self.workers[pool] += 1

    def _cost(self, pool: Pool) -> Fraction:
        return Fraction(0) if self.workers[pool] < self.held.get(pool, 0) else pool.devices


def _divided(pools: Sequence[Pool], left: Fraction) -> dict[Pool, int]:
    """Return the share of each pool, as if no worker ran."""
    counting = _Counting(left, dict.fromkeys(pools, 0), {pool: pool.wanted for pool in pools})
    counting.fill()
    return counting.workers


def _orders(pools: Sequence[Pool], shares: dict[Pool, int], left: Fraction) -> dict[Pool, int]:
    """Return the number to order for each pool: less at once, more as far as devices are free now."""
    # Never below the minimum, which the server would refuse: where it does not fit, the endpoint waits for devices.
    base = {pool: min(pool.ordered, max(shares[pool], pool.minimum)) for pool in pools}
    free = left - sum((pool.takes(base[pool]) for pool in pools), Fraction(0))
    counting = _Counting(free, base, shares, {pool: pool.staying for pool in pools})
    counting.fill()
    return counting.workers
