"""A queue of requests that wait for slots: classes of priority take turns, and so do keys within a class. Pure.

Which class is next: `Turns`. Of the keys with requests in that class it is the one that has used the fewest tokens:
start-time fair queueing (Goyal et al., SIGCOMM'96) with tokens as the measure of service, as in VTC (Sheng et al.,
OSDI'24). A key is charged with the context of each request that leaves the queue, and with what that request generates,
while others compete. One that comes back begins level with the one that was served last: it gets nothing for the time
in which it asked for nothing. A key alone gets everything. Within a key the lower priority number is served first, then
who came first. Callers without a key are one key.

Where all slots are taken, `make_room` names a running request that gives way to one of a higher class.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from dynamo_local.core.priority.classes import PriorityClass, ahead_of, class_of, lower_than

Item = TypeVar("Item")

_MORE_SERVED = 64
"""Served requests are looked through when their number has doubled, and is larger than this."""


@dataclass(frozen=True, order=True)
class Claim:
    """The place of a request in the queue. Of one class and key, the lowest is first: `arrival` is in seconds, `number`
    tells those apart that came at the same time. No two requests of a queue may have the same."""

    priority: int
    arrival: float
    number: int | str = 0
    key: str = ""


@dataclass(eq=False)
class _Lane(Generic[Item]):
    """What a key has waiting in a class, in order; never nothing."""

    claims: list[Claim] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)

    def add(self, claim: Claim, item: Item) -> None:
        at = bisect_left(self.claims, claim)
        self.claims.insert(at, claim)
        self.items.insert(at, item)

    def remove(self, claim: Claim) -> Item:
        at = bisect_left(self.claims, claim)
        del self.claims[at]
        return self.items.pop(at)


class _Keys(Generic[Item]):
    """The keys that wait in one class, and what they have used."""

    def __init__(self) -> None:
        self.lanes: dict[str, _Lane[Item]] = {}
        self._used: dict[str, int] = {}
        """Tokens of each key that waits, or has used more than `_level`."""
        self._level = 0
        """What the key that was served last had used before."""

    def add(self, claim: Claim, item: Item) -> None:
        lane = self.lanes.get(claim.key)
        if lane is None:
            if not self.lanes:
                # Nobody competed any more: all begin anew.
                self._level = max(self._used.values(), default=self._level)
                self._used.clear()
            lane = self.lanes[claim.key] = _Lane()
            self._used[claim.key] = max(self._used.get(claim.key, 0), self._level)
        lane.add(claim, item)

    def remove(self, claim: Claim) -> Item:
        lane = self.lanes[claim.key]
        item = lane.remove(claim)
        if not lane.items:
            del self.lanes[claim.key]
            self._used = {key: used for key, used in self._used.items() if key in self.lanes or used > self._level}
        return item

    def next(self) -> _Lane[Item]:
        if len(self.lanes) == 1:
            return next(iter(self.lanes.values()))
        return min(self.lanes.items(), key=self._turn)[1]

    def first(self, ready: Callable[[Item], bool]) -> Item | None:
        """Return the first one, in the order in which they are served, that is ready."""
        lanes = sorted(self.lanes.items(), key=self._turn)
        return next((item for _, lane in lanes for item in lane.items if ready(item)), None)

    def _turn(self, each: tuple[str, _Lane[Item]]) -> tuple[int, Claim]:
        key, lane = each
        return self._used[key], lane.claims[0]

    def serve(self, key: str) -> None:
        self._level = max(self._level, self._used[key])

    def charge(self, key: str, tokens: int) -> None:
        self._used[key] = max(self._used.get(key, 0), self._level) + tokens


@dataclass(eq=False)
class _Served(Generic[Item]):
    claim: Claim
    item: Item
    charged: int = 0
    passed: int = 0
    """Slots that other classes had got since its class had its last turn, when it was popped."""
    by_turn: bool = False
    """Whether it was popped, though a higher class waited, because it was its class's turn."""


class FairQueue(Generic[Item]):
    """Requests that wait, and, as long as they run, what is known of those that have left the queue."""

    def __init__(self, tokens: Callable[[Item], int], is_over: Callable[[Item], bool] = lambda _: True) -> None:
        """`tokens`: length of a request's context now; `is_over`: whether it has ended. Items are hashable."""
        self._tokens = tokens
        self._is_over = is_over
        self._turns = Turns()
        self._classes = {one: _Keys[Item]() for one in PriorityClass}
        self._claims: dict[Item, Claim] = {}
        self._served: dict[Item, _Served[Item]] = {}
        self._most_served = _MORE_SERVED
        self._offered: Item | None = None
        self._called: Item | None = None
        """The one that room was made for, until it has been offered."""

    def __len__(self) -> int:
        return len(self._claims)

    def __contains__(self, item: Item) -> bool:
        return item in self._claims

    def __iter__(self) -> Iterator[Item]:
        """The requests by class, then by priority number and arrival."""
        return iter(sorted(self._claims, key=self._claims.__getitem__))

    def add(self, item: Item, claim: Claim) -> None:
        """Queue a request; one that has left the queue is charged only with what comes on top."""
        self._claims[item] = claim
        self._keys(claim).add(claim, item)

    def peek(self) -> Item:
        """Return the request that is to be served next, which the next `pop` takes. Raises IndexError if nobody waits.

        A call after which no `pop` follows tells that there was no room for that request. Then a request of the class
        high, if one waits, is offered next time: a larger one whose turn it is keeps none of them waiting.
        """
        called, self._called = self._called, None
        self._offered = self._head(declined=self._offered) if called is None else called
        return self._offered

    def make_room(
        self,
        running: Iterable[Item],
        ready: Callable[[Item], bool] = lambda _: True,
        above: PriorityClass | None = None,
    ) -> Item | None:
        """Return the running request that is to give way to a waiting one, which `peek` returns next, or None.

        The one that waits is the first of the highest class of which any is `ready` to begin. `above`: only of a higher
        class than this one.
        """
        for one in PriorityClass:
            if one is above:
                break
            if (first := self._classes[one].first(ready)) is not None:
                found = self.gives_way(running, one)
                self._called = None if found is None else first
                return found
        return None

    @property
    def is_called(self) -> bool:
        """Whether room has been made for a request that has not been offered since."""
        return self._called is not None

    def gives_way(self, running: Iterable[Item], to: PriorityClass) -> Item | None:
        """Return the running request that gives way to one of class `to`, or None.

        It is of a lower class: so none gives way to one that gives way to it. Of those it is the one with the highest
        priority number, then the latest, as vLLM chooses. One that runs because it was its class's turn stays: the
        class is left its share. Nor does one that has not come from this queue give way.
        """
        least = lower_than(to)
        if least is None:
            return None
        known = (served for item in running if (served := self._served.get(item)) is not None)
        lower = [served for served in known if served.claim.priority >= least and not served.by_turn]
        return max(lower, key=lambda served: served.claim).item if lower else None

    def pop(self) -> Item:
        """Take the next request out, and charge its key. Raises IndexError if nobody waits."""
        item = self._head() if self._offered is None else self._offered
        claim = self._claims[item]
        self._keys(claim).serve(claim.key)
        self._take_out(item)
        served = self._served.setdefault(item, _Served(claim, item))
        one = class_of(claim.priority)
        served.by_turn = self._turns.is_due(one) and any(self._classes[each].lanes for each in ahead_of(one)[:-1])
        served.passed = self._turns.served(one)
        self._charge(served)
        if len(self._served) > self._most_served:
            self._look_at_served()
        return item

    def put_back(self, item: Item, claim: Claim) -> None:
        """Queue a request again that was popped a moment ago and could not be served: its class keeps its turn. Of
        several, the last one popped is put back first."""
        self._turns.not_served(class_of(claim.priority), self._served[item].passed)
        self.add(item, claim)

    def remove(self, item: Item) -> None:
        """Take a request out that is not to be served. Raises KeyError if it does not wait."""
        self._take_out(item)

    def _take_out(self, item: Item) -> None:
        claim = self._claims.pop(item)
        self._keys(claim).remove(claim)
        self._offered = None
        if self._called is item:
            self._called = None

    def _head(self, declined: Item | None = None) -> Item:
        waiting = [one for one in self._turns.order() if self._is_waiting(one)]
        if not waiting:
            raise IndexError("nobody waits")
        chosen = waiting[0]
        if declined is not None and PriorityClass.HIGH in waiting:
            was = class_of(self._claims[declined].priority)
            chosen = chosen if was is PriorityClass.HIGH else PriorityClass.HIGH
        keys = self._classes[chosen]
        if len(keys.lanes) > 1:
            self._look_at_served()
        return keys.next().items[0]

    def _is_waiting(self, one: PriorityClass) -> bool:
        if self._classes[one].lanes:
            return True
        self._turns.nobody(one)
        return False

    def _look_at_served(self) -> None:
        """Charge what has been generated meanwhile, and forget requests that are over."""
        for served in list(self._served.values()):
            self._charge(served)
            if self._is_over(served.item) and served.item not in self._claims:
                del self._served[served.item]
        self._most_served = max(2 * len(self._served), _MORE_SERVED)

    def _charge(self, served: _Served[Item]) -> None:
        more = self._tokens(served.item) - served.charged
        if more > 0:
            served.charged += more
            self._keys(served.claim).charge(served.claim.key, more)

    def _keys(self, claim: Claim) -> _Keys[Item]:
        return self._classes[class_of(claim.priority)]


def in_turn(items: Iterable[Item], claim: Callable[[Item, int], Claim], tokens: Callable[[Item], int]) -> list[Item]:
    """Return requests that wait together in the order in which a queue would serve them. `claim` gets a request and its
    number among these."""
    queue = FairQueue(tokens)
    for number, item in enumerate(items):
        queue.add(item, claim(item, number))
    return [queue.pop() for _ in range(len(queue))]


# Which class of waiting requests gets the next slot: the highest, but none waits for ever. Pure.

LEAST_SHARE = 0.05
"""Share of the slots that each class gets at least while it waits."""

# Two classes may be due at the same time, so each is due one slot early.
_DUE_AFTER = round(1 / LEAST_SHARE) - 2


class Turns:
    """Turns of the classes at slots that become free one after another."""

    def __init__(self) -> None:
        self._passed = dict.fromkeys(PriorityClass, 0)
        """Slots that others got since the class had its last turn, or was found empty."""

    def order(self) -> tuple[PriorityClass, ...]:
        """Return the order in which classes are asked for the next slot: those that are due, then the highest."""
        due = [one for one in PriorityClass if self.is_due(one)]
        due.sort(key=lambda one: -self._passed[one])
        return (*due, *(one for one in PriorityClass if one not in due))

    def row(self, chosen: PriorityClass) -> int:
        """Return how many slots the class may get in a row before another one's turn; at least 1."""
        if self.is_due(chosen):
            return 1
        return max(1, _DUE_AFTER - max(self._passed[one] for one in PriorityClass if one is not chosen))

    def served(self, chosen: PriorityClass, slots: int = 1) -> int:
        """Note that the class got so many slots. Return how many others had got since its last turn."""
        before = self._passed[chosen]
        for one in PriorityClass:
            self._passed[one] = 0 if one is chosen else self._passed[one] + slots
        return before

    def not_served(self, chosen: PriorityClass, before: int) -> None:
        """Note that the class could not use the slot that it was given last. `before`: what `served` returned then."""
        for one in PriorityClass:
            self._passed[one] = before if one is chosen else max(self._passed[one] - 1, 0)

    def nobody(self, empty: PriorityClass) -> None:
        """Note that nobody of the class waits."""
        self._passed[empty] = 0

    def is_due(self, one: PriorityClass) -> bool:
        """Whether the next slot is this class's, whoever else waits."""
        return self._passed[one] >= _DUE_AFTER
