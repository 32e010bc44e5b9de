"""Endpoints that share devices, as the turns see them, and the limits of a turn. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dynamo_local.core.shares import Left, fits, less, more, placed, share_of

TURN_S = 30.0
"""How long an endpoint with requests keeps its devices while others wait for them."""


PAUSE_S = 0.2
"""How long an endpoint may be without a request within its turn before it yields."""


@dataclass(frozen=True)
class Limits:
    """`turn_s` and `pause_s` in seconds: see TURN_S and PAUSE_S."""

    turn_s: float = TURN_S
    pause_s: float = PAUSE_S


@dataclass(frozen=True)
class Claim:
    """A worker, by the name of its watcher, and what it has of each of its devices."""

    worker: str
    devices: tuple[int, ...]
    share: float = 1.0
    prefill: bool = False


@dataclass(frozen=True)
class Contender:
    """An endpoint now. Times are of one clock, in seconds.

    `workers`: those that are present (starting, ready or parked) in the order in which they are kept; `ending`: those
    whose devices become free in a moment. `least`, `least_prefill`: minimums. `running`: requests under way, without
    those that are held; None if a frontend does not say. `idle_since`: when it had its last request, or became ready;
    None while it has one, held or running. `turn_since`: when its first worker became ready; None before.
    `needs`: amounts of devices of the workers that it lacks to serve a request, while no worker of it is present;
    `waits_since`: since when somebody waits for them, a request or its owner; None if nobody does. `kept`: a schedule
    keeps it awake.
    """

    name: str
    workers: tuple[Claim, ...] = ()
    ending: tuple[Claim, ...] = ()
    least: int = 0
    least_prefill: int = 0
    running: int | None = 0
    idle_since: float | None = None
    turn_since: float | None = None
    needs: tuple[float, ...] = ()
    waits_since: float | None = None
    kept: bool = False


# Turns of endpoints on devices that are fewer than they. Pure.

_LIMITS = Limits()


@dataclass(frozen=True)
class Yield:
    """An endpoint's workers that are to end for the endpoint `to`, which gets their devices.

    `finishing`: requests that run finish first, and no new ones are taken meanwhile. Workers beside which others of the
    endpoint stay (`stays`) end at once: their requests go on there.
    """

    endpoint: str
    to: str
    workers: tuple[str, ...]
    finishing: bool
    stays: bool
    why: str


@dataclass(frozen=True)
class Turns:
    """`reserved`: devices, by the endpoint that alone may take them, which are free or become free for it. `waits`: for
    each endpoint that cannot start now, what it waits for. `look_at`: when all this may change without
    anything else that happens."""

    yields: tuple[Yield, ...] = ()
    reserved: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    waits: Mapping[str, str] = field(default_factory=dict)
    look_at: float | None = None

    @property
    def closed(self) -> frozenset[str]:
        """Endpoints that take no new requests."""
        return frozenset(each.endpoint for each in self.yields if not each.stays)

    def reserved_for_others(self, endpoint: str) -> dict[int, str]:
        """The devices that this endpoint may not take, and for whom they are kept."""
        return {device: name for name, ids in self.reserved.items() if name != endpoint for device in ids}


def longest_wait_s(others: int, limits: Limits, longest_request_s: float, start_s: float) -> float:
    """The longest wait of a request for an endpoint where each worker takes one device, and no start fails. `others`:
    endpoints that wait before it, and the one that has the device; `longest_request_s`: of any request that runs;
    `start_s`: time of an end and a start.

    A request that comes right after its endpoint's turn waits until those that run have finished, then for a turn of
    each of the others, and the start."""
    return others * (limits.turn_s + longest_request_s + start_s) + longest_request_s + start_s


def take_turns(contenders: Iterable[Contender], free: Left, now: float, limits: Limits = _LIMITS) -> Turns:
    """Decide who yields to whom. `free`: what is left of each device, of which nobody's worker has a claim."""
    by_name = {each.name: each for each in contenders}
    room: Left = dict(free)
    for claim in (claim for each in by_name.values() for claim in each.ending):
        room = more(room, claim.devices, claim.share)
    units = sorted(units_of(by_name.values(), now, limits), key=lambda unit: unit.key)
    round_ = _Round(now, limits, dict(free), room, units)
    for each in _in_line(by_name.values()):
        round_.serve(each)
    return round_.turns()


@dataclass
class _Round:
    """Serves those that wait, one after the other. `free`: what is left of each device now; `room`: with what
    becomes free in a moment; `units`: who may yield, in order."""

    now: float
    limits: Limits
    free: Left
    room: Left
    units: list[Unit]
    yields: list[Yield] = field(default_factory=list)
    reserved: dict[str, tuple[int, ...]] = field(default_factory=dict)
    waits: dict[str, str] = field(default_factory=dict)
    moments: list[float] = field(default_factory=list)

    def serve(self, waiting: Contender) -> None:
        """Reserve devices for an endpoint that waits, and have others yield them once they may."""
        units = [unit for unit in self.units if unit.of.name != waiting.name and self._may_take(waiting, unit)]
        needed = needed_of(self.room, units, waiting.needs)
        if needed is None:
            self.waits[waiting.name] = f"waits for a device: {self._why_none(waiting)}"
            return
        self.units = [unit for unit in self.units if unit not in needed]
        later = [unit for unit in needed if unit.at > self.now]
        self._reserve(waiting, needed, returns=not later)
        if later:
            self.moments.append(max(unit.at for unit in later))
            names = ", ".join(sorted({unit.of.name for unit in later}))
            turn = _seconds(self.limits.turn_s)
            self.waits[waiting.name] = f"waits for a device: {names} may keep it for the rest of a turn of {turn}"
            return
        for name in sorted({unit.of.name for unit in needed}):
            self.yields.append(self._yield([unit for unit in needed if unit.of.name == name], waiting))
        unfinished = [each.endpoint for each in self.yields if each.to == waiting.name and each.finishing]
        if unfinished:
            self.waits[waiting.name] = f"waits for a device: requests of {', '.join(unfinished)} finish first"

    def turns(self) -> Turns:
        return Turns(tuple(self.yields), self.reserved, self.waits, min(self.moments, default=None))

    def _may_take(self, waiting: Contender, unit: Unit) -> bool:
        if waiting.waits_since is not None:
            return True
        if unit.rank != 0:
            return False
        unused_at = unit.since + self.limits.turn_s
        if unused_at > self.now:
            self.moments.append(unused_at)
        return unused_at <= self.now

    def _reserve(self, waiting: Contender, needed: Iterable[Unit], *, returns: bool) -> None:
        """`returns`: whether the units yield now, so that others may have what is over of their devices."""
        after = room_with(self.room, needed)
        found = placed(after, waiting.needs)
        assert found is not None, "it was tried"
        if returns:
            self.room = after
        for ids, amount in zip(found, waiting.needs, strict=True):
            if any(not fits(1 - self.free.get(device, 0.0), share_of(amount)) for device in ids):
                self.waits[waiting.name] = "waits for a device: the workers that hold it are ending"
            self.free = less(self.free, ids, share_of(amount))
            self.room = less(self.room, ids, share_of(amount))
        self.reserved[waiting.name] = tuple(sorted({device for ids in found for device in ids}))

    def _why_none(self, waiting: Contender) -> str:
        if waiting.waits_since is None:
            return "others use them, and a schedule takes none from those"
        if self.reserved:
            return f"{', '.join(sorted(self.reserved))} waited before it"
        return "all are held by minimums of endpoints, or by others on the machine"

    def _yield(self, units: Sequence[Unit], to: Contender) -> Yield:
        of, stays = units[0].of, all(unit.stays for unit in units)
        workers = tuple(worker for unit in units for worker in unit.workers)
        finishing = of.running != 0 and not stays
        if units[0].rank <= 1:
            state = f"without a request for {_seconds(self.now - units[0].since)}"
        else:
            first = f", {_requests(of.running)} first" if finishing and of.running else ""
            state = f"its turn of {_seconds(self.limits.turn_s)} is over{first}"
        what = f"{len(workers)} of its {len(of.workers)} workers" if stays else "its device"
        asked = "kept awake by its schedule"
        if to.waits_since is not None:
            asked = f"asked for {_seconds(self.now - to.waits_since)} ago"
        return Yield(of.name, to.name, workers, finishing, stays, f"yields {what} to {to.name}, {asked}: {state}")


def _in_line(contenders: Iterable[Contender]) -> list[Contender]:
    """Orders the endpoints that need devices: who has waited longest comes first, then who is kept awake by a
    schedule."""
    lacking = [each for each in contenders if each.needs and (each.waits_since is not None or each.kept)]
    return sorted(lacking, key=lambda one: (math.inf if one.waits_since is None else one.waits_since, one.name))


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"


def _requests(number: int) -> str:
    return f"{number} request finishes" if number == 1 else f"{number} requests finish"


# Workers that yield together: which there are, in which order they may, and which of them are enough. Pure.

Rank = Literal[0, 1, 2, 3, 4]


@dataclass(frozen=True)
class Unit:
    """Workers of an endpoint that yield together. `at`: from when on they may. `rank`: 0 without requests, 1 the same
    and kept, 2 turn over and others stay, 3 turn over, 4 within the turn."""

    of: Contender
    claims: tuple[Claim, ...]
    stays: bool
    rank: Rank
    at: float
    since: float

    @property
    def key(self) -> tuple[int, float, str, bool, str]:
        # The last workers of an endpoint come after its others.
        return self.rank, self.since, self.of.name, not self.stays, self.claims[0].worker

    @property
    def workers(self) -> tuple[str, ...]:
        return tuple(claim.worker for claim in self.claims)

    def returned(self, room: Left) -> Left:
        """The room once these workers have ended."""
        for claim in self.claims:
            room = more(room, claim.devices, claim.share)
        return room


def units_of(contenders: Iterable[Contender], now: float, limits: Limits) -> Iterable[Unit]:
    for each in contenders:
        beyond, last = _parts(each)
        rank, at, since = _standing(each, now, limits)
        for claim in beyond:
            yield Unit(each, (claim,), True, rank, at, since)
        if last:
            alone: Rank = 3 if rank == 2 else rank
            yield Unit(each, last, False, alone, at, since)


def _parts(contender: Contender) -> tuple[list[Claim], tuple[Claim, ...]]:
    """Workers beyond those that it needs at least, and those of an endpoint without a minimum that end together."""
    kinds = ((False, contender.least), (True, contender.least_prefill))
    beyond: list[Claim] = []
    last: list[Claim] = []
    for prefill, least in kinds:
        mine = [claim for claim in contender.workers if claim.prefill == prefill]
        beyond += mine[max(least, 1) :]
        last += mine[: max(least, 1)]
    return beyond, () if contender.least else tuple(last)


def _standing(each: Contender, now: float, limits: Limits) -> tuple[Rank, float, float]:
    """Rank of its workers, from when on they may yield, and the time that decides among equals."""
    turn_ends = (now if each.turn_since is None else each.turn_since) + limits.turn_s
    if each.idle_since is not None:
        # Before a worker is ready there is no client that could ask the next question.
        pause_ends = each.idle_since + (limits.pause_s if each.turn_since is not None else 0)
        at = min(pause_ends, turn_ends)
        return (4, at, at) if at > now else (1 if each.kept else 0, at, each.idle_since)
    if turn_ends > now:
        return 4, turn_ends, turn_ends
    return 2, turn_ends, turn_ends


def needed_of(room: Left, units: Sequence[Unit], amounts: Sequence[float]) -> list[Unit] | None:
    """The units that must yield so that workers of these amounts fit, the first ones in order; None if not even all of
    them are enough."""
    taken: list[Unit] = []
    for unit in units:
        if placed(room_with(room, taken), amounts) is not None:
            break
        taken.append(unit)
    if placed(room_with(room, taken), amounts) is None:
        return None
    for unit in tuple(reversed(taken)):
        fewer = [each for each in taken if each is not unit]
        if _is_whole(fewer, units) and placed(room_with(room, fewer), amounts) is not None:
            taken = fewer
    return taken


def _is_whole(taken: Sequence[Unit], units: Iterable[Unit]) -> bool:
    """Whether an endpoint whose last workers yield keeps none of its others."""
    ended = {unit.of.name for unit in taken if not unit.stays}
    return all(unit in taken for unit in units if unit.of.name in ended)


def room_with(room: Left, units: Iterable[Unit]) -> Left:
    for unit in units:
        room = unit.returned(room)
    return room
