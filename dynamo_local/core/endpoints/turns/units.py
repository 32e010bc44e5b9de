"""Workers that yield together: which there are, in which order they may, and which of them are enough. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from dynamo_local.core.endpoints.turns.contenders import Claim, Contender, Limits
from dynamo_local.core.endpoints.turns.placing import Room, more, placed

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

    def returned(self, room: Room) -> Room:
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


def needed_of(room: Room, units: Sequence[Unit], amounts: Sequence[float]) -> list[Unit] | None:
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


def room_with(room: Room, units: Iterable[Unit]) -> Room:
    for unit in units:
        room = unit.returned(room)
    return room
