"""Requests that are to move to a worker: room kept for them, and blocks that are warm already. Pure.

A guest is announced (`reserve`), its KV is pulled (`hold`), and it arrives (its submission comes). Its slot is its own
then, as any request's; what was pulled for it is held until its first token, with which it has taken that over.
Guests that neither arrive nor are given back leave when their time is over, or their frontend is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynamo_local.core.messages.work import RequestEpoch

MOST_GUESTS = 64
"""Announced at the same time, to one worker."""


@dataclass(frozen=True)
class Warmed:
    """A warm request that has run, and the context whose KV is held in its name."""

    request: RequestEpoch
    token_ids: Sequence[int]
    cache_salt: str | None = None
    adapter: str | None = None


@dataclass
class _Reservation:
    frontend: str
    blocks: int
    until: float
    arrived: bool = False
    warmed: Warmed | None = None


class Reservations:
    """Of one worker, by request id."""

    def __init__(self) -> None:
        self._guests: dict[str, _Reservation] = {}

    @property
    def awaited(self) -> int:
        """Guests that have not arrived."""
        return sum(not guest.arrived for guest in self._guests.values())

    @property
    def awaited_blocks(self) -> int:
        """Kept for these."""
        return sum(guest.blocks for guest in self._guests.values() if not guest.arrived)

    def expects(self, request_id: str) -> bool:
        """Whether there is room kept for it."""
        return request_id in self._guests

    def until(self, request_id: str) -> float:
        """How long its room is kept. Raises KeyError for no guest."""
        return self._guests[request_id].until

    def reserve(
        self, request_id: str, frontend: str, blocks: int, until: float, free_slots: int, free_blocks: int
    ) -> str | None:
        """Keep room for a request of `frontend` until then. `free_slots` and `free_blocks` are what running requests
        leave, guests not counted. Returns why there is none, or None."""
        others = [guest for name, guest in self._guests.items() if name != request_id]
        if len(others) >= MOST_GUESTS:
            return "too many requests are to move there"
        if free_slots - sum(not guest.arrived for guest in others) < 1:
            return "as many requests run there as it can run"
        if free_blocks - sum(guest.blocks for guest in others if not guest.arrived) < blocks:
            return "too little of its KV cache is free"
        known = self._guests.get(request_id)
        self._guests[request_id] = _Reservation(
            frontend, blocks, until, warmed=known.warmed if known is not None else None
        )
        return None

    def hold(self, request_id: str, warmed: Warmed) -> list[RequestEpoch]:
        """The KV of this warm request is held for the guest. Returns the holds that are needed no more: the earlier
        one, or this one if there is no such guest."""
        guest = self._guests.get(request_id)
        if guest is None:
            return [warmed.request]
        earlier, guest.warmed = guest.warmed, warmed
        return _holds(earlier)

    def warmed(
        self, request_id: str, token_ids: Sequence[int], cache_salt: str | None = None, adapter: str | None = None
    ) -> Warmed | None:
        """What is held for the guest, if this context goes on from it."""
        guest = self._guests.get(request_id)
        found = None if guest is None else guest.warmed
        if found is None or (found.cache_salt, found.adapter) != (cache_salt, adapter):
            return None
        if len(found.token_ids) >= len(token_ids):
            return None
        return found if token_ids[: len(found.token_ids)] == found.token_ids else None

    def arrive(self, request_id: str) -> None:
        """Its submission is here."""
        if (guest := self._guests.get(request_id)) is not None:
            guest.arrived = True

    def leave(self, request_id: str) -> list[RequestEpoch]:
        """It has its first token, or does not come. Returns the holds that are needed no more."""
        guest = self._guests.pop(request_id, None)
        return [] if guest is None else _holds(guest.warmed)

    def of_frontend(self, frontend: str) -> list[str]:
        """Its guests, whether they have arrived or not."""
        return [name for name, guest in self._guests.items() if guest.frontend == frontend]

    def expire(self, now: float) -> list[RequestEpoch]:
        """Those whose time is over leave. Returns the holds that are needed no more."""
        over = [name for name, guest in self._guests.items() if guest.until <= now]
        return [hold for name in over for hold in self.leave(name)]


def _holds(warmed: Warmed | None) -> list[RequestEpoch]:
    return [] if warmed is None else [warmed.request]
