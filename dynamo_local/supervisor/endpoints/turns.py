"""Has the endpoints of a server take turns on its devices: asks core/endpoints/turns.py who yields to whom, and has it
carried out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dynamo_local.core.endpoints.idling import Idling
from dynamo_local.core.endpoints.rollout import Frontends, Ordered, Seen
from dynamo_local.core.endpoints.turns import Claim, Contender, Limits, Turns, Yield, take_turns
from dynamo_local.core.errors import DynamoError
from dynamo_local.core.fleet.view import PREFILL_ROLE
from dynamo_local.core.messages.reports import Event
from dynamo_local.core.names import endpoint_of
from dynamo_local.core.shares import Left, less, placed, share_of
from dynamo_local.supervisor.circus.process_registry import Registration
from dynamo_local.supervisor.endpoints.board import BoardWriter
from dynamo_local.supervisor.endpoints.record import EndpointRecord
from dynamo_local.supervisor.places.capacity import Capacity, Startable
from dynamo_local.supervisor.server.launch.templates import ServiceTemplate
from state.statefile.model import State

if TYPE_CHECKING:
    from dynamo_local.supervisor.endpoints.endpoint import EndpointRun


@dataclass
class Turn:
    """Times are CLOCK_MONOTONIC, in s.

    `yields`: why the endpoint gives its devices to another one, and new requests are held; empty if it does not.
    `lacking`: what the workers take of devices that it lacks to serve requests; `waits_since`: since when somebody
    waits for them. `since`: since when a worker of it has been ready.
    """

    yields: str = ""
    lacking: tuple[float, ...] = ()
    waits_since: float | None = None
    since: float | None = None

    def note(self, lacking: tuple[float, ...], current: Seen, idling: Idling, now: float) -> None:
        """Follow a look at the endpoint. `lacking`: of the workers that it is to have at least."""
        is_awake, self.lacking = idling.rest == "awake", lacking
        if not lacking or not is_awake:
            self.waits_since = None
        elif self.waits_since is None:
            self.waits_since = now if idling.waking_since is None else idling.waking_since
        if not current.workers.ready or not is_awake:
            self.since = None
        elif self.since is None:
            self.since = now


def may_start(ordered: Ordered, current: Seen, *, kept: bool) -> bool:
    """Whether devices would be of use to the endpoint. `kept`: it is to be awake without a request."""
    is_wanted = (kept or ordered.rest == "awake") and not ordered.deleting and not ordered.wake_failed
    return is_wanted and current.launched and not current.has_failed and current.under_way != "ending"


def running(frontends: list[Frontends]) -> int | None:
    """Requests under way at these frontends, without those that are held; None if one of them does not say."""
    if any(None in (one.in_flight, one.held) for one in frontends):
        return None
    return sum(max(0, (one.in_flight or 0) - (one.held or 0)) for one in frontends)


_EVERY_S = 1.0
"""Time between two looks while somebody waits and nothing is heard."""
_AT_LEAST_S = 0.01


@dataclass
class TurnKeeper:
    """Decides who yields to whom whenever an endpoint waits for devices. `runs`: all endpoints with workers of their
    own. `turns`: the last decision."""

    runs: Mapping[str, EndpointRun]
    registration: Registration
    capacity: Capacity
    board: BoardWriter
    record: EndpointRecord
    limits: Limits
    clock: Callable[[], float] = time.monotonic
    turns: Turns = field(default_factory=Turns, init=False)
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _swaps: Swaps = field(init=False)

    def __post_init__(self) -> None:
        self._swaps = Swaps(self.record.note)

    def looked(self, run: EndpointRun) -> None:
        """Note that the endpoint may have changed. Does little while nobody waits."""
        turn, awaited = run.turn, self.turns != Turns() or self._swaps.are_under_way
        if turn.waits_since is not None or turn.lacking or turn.yields or awaited:
            self._changed.set()

    def why_short(self, endpoint: str) -> str:
        """What an endpoint waits for that has not the devices that it needs; empty if nobody's turn is awaited."""
        return self.turns.waits.get(endpoint, "") if self.turns.reserved else ""

    def startable(self, endpoint: str, state: State, templates: Sequence[ServiceTemplate]) -> Startable:
        """For how many workers of the endpoint, one of each of these templates, there are devices that are not kept for
        others. Blocks."""
        found = self.capacity.startable(state, templates)
        number = self.most(endpoint, state, [one.device_count for one in templates[: found.workers]])
        shortage = self.why_short(endpoint) or found.shortage or "others wait for the devices that are free"
        return Startable(number, "" if number >= len(templates) else shortage, found.gone)

    def most(self, endpoint: str, state: State, amounts: Sequence[float]) -> int:
        """How many workers that take these amounts the endpoint may start without devices that are kept for others.
        Blocks."""
        if not self.turns.reserved_for_others(endpoint):
            return len(amounts)
        return len(self._devices(endpoint, state, amounts))

    def nodes(self, endpoint: str, state: State, amounts: Sequence[float]) -> tuple[str, ...]:
        """The only node that each worker of the endpoint may start on that takes these amounts; empty where any will
        do, since nothing is kept for others. Fewer, if the others are not to start now. Blocks."""
        if not self.turns.reserved_for_others(endpoint):
            return ("",) * len(amounts)
        return tuple(self.capacity.node(ids[0]) for ids in self._devices(endpoint, state, amounts))

    def _devices(self, endpoint: str, state: State, amounts: Sequence[float]) -> list[tuple[int, ...]]:
        """The devices of each of the workers that take these amounts: those that are kept for the endpoint come first,
        and none that is kept for another one is among them. Stops at the first that does not fit. Blocks."""
        mine = self.turns.reserved.get(endpoint, ())
        left: Left = {
            **self.capacity.free(state),
            **dict.fromkeys(self.turns.reserved_for_others(endpoint), 0.0),
        }
        devices: list[tuple[int, ...]] = []
        for amount in amounts:
            found = placed({one: left[one] for one in mine if one in left}, [amount]) or placed(left, [amount])
            if found is None:
                break
            left = less(left, found[0], share_of(amount))
            devices.append(found[0])
        return devices

    async def run(self) -> None:
        """Decide whenever something may have changed, until cancelled."""
        while True:
            try:
                await self._decide()
            except DynamoError:
                # The endpoints themselves tell of a statefile or a board that is out of order.
                self._changed.set()
                await asyncio.sleep(_EVERY_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._look_in_s()):
                    await self._changed.wait()
            self._changed.clear()

    async def _decide(self) -> None:
        now = self.clock()
        state = await asyncio.to_thread(self.registration.read)
        runs = dict(self.runs)
        found = [_contender(run, state, self.capacity) for run in runs.values()]
        free = await asyncio.to_thread(self.capacity.free, state) if any(each.needs for each in found) else {}
        before, self.turns = self.turns, take_turns(found, free, now, self.limits)
        self._swaps.look(self.turns.yields, _awake(runs), now)
        await self._close(runs, {each.name for each in found if each.workers or each.ending})
        for each in self.turns.yields:
            if not each.finishing and each.endpoint in runs:
                _carry_out(each, runs[each.endpoint])
        for name in runs:
            mine = self.turns.reserved.get(name), self.turns.waits.get(name)
            if mine != (before.reserved.get(name), before.waits.get(name)):
                runs[name].may_start(freely=mine[0] is not None and mine[1] is None)

    async def _close(self, runs: Mapping[str, EndpointRun], holding: Collection[str]) -> None:
        """Have frontends hold requests for endpoints that are to yield, before their workers end. Raises StateError."""
        whys = {each.endpoint: each.why for each in self.turns.yields if not each.stays}
        changed: dict[str, str] = {}
        for name, run in runs.items():
            # Its workers, which end, would take requests until they are gone.
            ends = run.idleness.rest == "asleep" and name in holding
            text = whys.get(name, run.turn.yields if ends else "")
            if bool(text) != bool(run.turn.yields):
                changed[name], run.turn.yields = run.turn.yields, text
        if not changed:
            return
        try:
            await self.board.publish()
        except DynamoError:
            for name, before in changed.items():
                runs[name].turn.yields = before
            raise

    def _look_in_s(self) -> float | None:
        if self.turns == Turns():
            return None
        if self.turns.look_at is None:
            return _EVERY_S
        return max(_AT_LEAST_S, min(_EVERY_S, self.turns.look_at - self.clock()))


def _carry_out(each: Yield, run: EndpointRun) -> None:
    if each.stays:
        run.give(each.workers)
    else:
        run.yield_to(each.to)


def _awake(runs: Mapping[str, EndpointRun]) -> Awake:
    def awake(name: str) -> tuple[bool, float | None]:
        run = runs.get(name)
        return (False, None) if run is None else (run.idleness.rest == "awake", run.turn.since)

    return awake


def _contender(run: EndpointRun, state: State, capacity: Capacity) -> Contender:
    """What an endpoint has and wants. One that is updated or deleted keeps what it has until that is done."""
    mine = [c for c in state.components.values() if c.holds and endpoint_of(c.revision) == run.name]
    mine.sort(key=lambda component: component.watcher)
    ends = run.deleting or run.idleness.rest == "asleep"
    ending = [c for c in mine if ends or c.phase == "retiring"]
    stays = () if run.is_changing else tuple(c for c in mine if c not in ending)
    claims = {
        c.watcher_name: Claim(c.watcher_name, capacity.ids(c), c.resources.share, c.role == PREFILL_ROLE) for c in mine
    }
    spec = run.entry.spec
    return Contender(
        run.name,
        workers=tuple(claims[c.watcher_name] for c in stays),
        ending=tuple(claims[c.watcher_name] for c in ending),
        least=spec.min_workers,
        least_prefill=spec.min_prefill_workers if spec.disaggregated and spec.min_workers else 0,
        running=run.running,
        idle_since=run.idle_since if stays else None,
        turn_since=run.turn.since,
        needs=run.turn.lacking,
        waits_since=run.turn.waits_since,
        kept=run.kept,
    )


# Tells of devices that endpoints give to others: when that is decided, and when the other one has a worker.

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
