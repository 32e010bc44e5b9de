"""A worker's reservations for requests that are to migrate to it: room kept for them, and KV that is warm already.
Pure.

A reservation is made (`reserve`), the request's KV is pulled and held (`hold`), and the request arrives (`arrive`).
From then on the request has its slot and its blocks as any other; the KV that was pulled for it is held until its first
token, with which the request has taken that KV over. A reservation whose request neither arrives nor is cancelled ends
when its time is over, or when its frontend is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynamo_local.core.messages.work import RequestEpoch

MAX_RESERVATIONS = 64
"""Number of reservations of one worker at the same time, at most."""


@dataclass(frozen=True)
class Warmed:
    """The request by which KV was computed or pulled, and the context whose KV the engine holds for it."""

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
    """The reservations of one worker, by request id."""

    def __init__(self) -> None:
        self._reservations: dict[str, _Reservation] = {}

    def __len__(self) -> int:
        return len(self._reservations)

    @property
    def awaited(self) -> int:
        """Number of reservations whose requests have not arrived."""
        return sum(not reservation.arrived for reservation in self._reservations.values())

    @property
    def awaited_blocks(self) -> int:
        """Number of KV blocks that are kept for these."""
        return sum(reservation.blocks for reservation in self._reservations.values() if not reservation.arrived)

    def expects(self, request_id: str) -> bool:
        """Return whether there is a reservation for the request."""
        return request_id in self._reservations

    def until(self, request_id: str) -> float:
        """Return when the request's reservation ends (CLOCK_MONOTONIC, s). Raises KeyError if there is none."""
        return self._reservations[request_id].until

    def reserve(
        self, request_id: str, frontend: str, blocks: int, until: float, free_slots: int, free_blocks: int
    ) -> str | None:
        """Keep room for a request of `frontend` until a time (CLOCK_MONOTONIC, s). Return why there is no room, or
        None.

        `free_slots` and `free_blocks` are what running requests leave; reservations are subtracted here.
        """
        others = [other for name, other in self._reservations.items() if name != request_id]
        if len(others) >= MAX_RESERVATIONS:
            return "too many requests are to move there"
        if free_slots - sum(not other.arrived for other in others) < 1:
            return "as many requests run there as it can run"
        if free_blocks - sum(other.blocks for other in others if not other.arrived) < blocks:
            return "too little of its KV cache is free"
        known = self._reservations.get(request_id)
        self._reservations[request_id] = _Reservation(
            frontend, blocks, until, warmed=known.warmed if known is not None else None
        )
        return None

    def hold(self, request_id: str, warmed: Warmed) -> list[RequestEpoch]:
        """Note that the engine holds KV for the request. Return the holds that are needed no more: the request's
        earlier one, or this one if there is no reservation."""
        reservation = self._reservations.get(request_id)
        if reservation is None:
            return [warmed.request]
        earlier, reservation.warmed = reservation.warmed, warmed
        return _holds(earlier)

    def warmed(
        self, request_id: str, token_ids: Sequence[int], cache_salt: str | None = None, adapter: str | None = None
    ) -> Warmed | None:
        """Return what is held for the request, if this context begins with it and is longer."""
        reservation = self._reservations.get(request_id)
        found = None if reservation is None else reservation.warmed
        if found is None or (found.cache_salt, found.adapter) != (cache_salt, adapter):
            return None
        if len(found.token_ids) >= len(token_ids):
            return None
        return found if token_ids[: len(found.token_ids)] == found.token_ids else None

    def arrive(self, request_id: str) -> None:
        """Note that the request was submitted to this worker."""
        if (reservation := self._reservations.get(request_id)) is not None:
            reservation.arrived = True

    def leave(self, request_id: str) -> list[RequestEpoch]:
        """End the reservation: the request has its first token, or does not come. Return the holds that are needed no
        more."""
        reservation = self._reservations.pop(request_id, None)
        return [] if reservation is None else _holds(reservation.warmed)

    def of_frontend(self, frontend: str) -> list[str]:
        """Return the ids of the frontend's requests with reservations, arrived or not."""
        return [name for name, reservation in self._reservations.items() if reservation.frontend == frontend]

    def expire(self, now: float) -> list[RequestEpoch]:
        """End the reservations whose time is over. Return the holds that are needed no more."""
        over = [name for name, reservation in self._reservations.items() if reservation.until <= now]
        return [hold for name in over for hold in self.leave(name)]


def _holds(warmed: Warmed | None) -> list[RequestEpoch]:
    return [] if warmed is None else [warmed.request]
