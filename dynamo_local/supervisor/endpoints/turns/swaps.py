"""Tells of devices that endpoints give to others: when that is decided, and when the other one has a worker."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from dynamo_local.core.endpoints.turns.turns import Yield
from dynamo_local.core.messages.events import Event

Awake = Callable[[str], tuple[bool, float | None]]
"""Whether the endpoint of that name is to be awake, and since when a worker of it is ready (CLOCK_MONOTONIC, s)."""


@dataclass(frozen=True)
class _Swap:
    """A swap that was decided at `began_at` (CLOCK_MONOTONIC, s), with its reason in words."""

    began_at: float
    why: str


@dataclass
class Swaps:
    """The swaps that are under way. `record`: notes an event."""

    record: Callable[[Event], None]
    _under_way: dict[tuple[str, str], _Swap] = field(default_factory=dict, init=False)
    """By the endpoint that yields and the one that its devices go to."""

    @property
    def are_under_way(self) -> bool:
        """Whether the end of a swap is awaited."""
        return bool(self._under_way)

    def look(self, yields: Iterable[Yield], awake: Awake, now: float) -> None:
        """Follow a decision."""
        yields = tuple(yields)
        for each in yields:
            if (each.endpoint, each.to) not in self._under_way:
                what, _, why = each.why.partition(", ")
                self._under_way[each.endpoint, each.to] = _Swap(now, why)
                self.record(Event("swap", what, why, endpoint=each.endpoint, to=each.to))
        going_on = {(each.endpoint, each.to) for each in yields}
        for (giver, to), swap in tuple(self._under_way.items()):
            is_awake, since = awake(to)
            if since is not None and since >= swap.began_at:
                self._end(giver, to, swap, since - swap.began_at)
            elif not is_awake and (giver, to) not in going_on:
                # Nobody waits for the devices any more, or the start has failed: that is told by itself.
                del self._under_way[giver, to]

    def _end(self, giver: str, to: str, swap: _Swap, took_s: float) -> None:
        del self._under_way[giver, to]
        what = f"gave its device to {to} within {took_s:.2f} s"
        self.record(Event("swap", what, swap.why, endpoint=giver, to=to, took_s=round(took_s, 3)))
