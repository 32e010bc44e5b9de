"""Messages from frontends to the destinations of migrations (core/migration/protocol.py)."""

from __future__ import annotations

from dynamo_local.core.codec import Message


class Reserve(Message, frozen=True, omit_defaults=True, tag="reserve"):
    """Order to reserve a run slot and blocks for `tokens` tokens, for `keep_s` seconds.

    The reservation ends earlier when the request is submitted, when it is cancelled, and when `frontend`, whose request
    it is, is gone. A second one for the same request replaces the first.

    `floor`: reserve only if the worker's freeness, in steps, stays at least at that with all its reservations, of which
    the frontend knows only its own.
    """

    request_id: str
    frontend: str
    tokens: int
    keep_s: float
    floor: float | None = None


class Warm(Message, frozen=True, omit_defaults=True, tag="warm"):
    """Order to get the KV of `token_ids`: pull the full blocks from `source`, compute the rest. There must be a
    reservation for the request, for as long as which the KV is held. Answered when the KV is there.

    The frontend waits for the answer for `within_s` seconds.
    """

    request_id: str
    source: str
    token_ids: list[int]
    within_s: float
    cache_salt: str | None = None
    adapter: str | None = None
    priority: int = 0
    key: str = ""


class CancelReservation(Message, frozen=True, tag="cancel_reservation"):
    """Order to end a reservation: the request does not come. Unknown requests are ignored."""

    request_id: str


class MigrationAnswer(Message, frozen=True, omit_defaults=True):
    """Confirms an order, or says in `refused` why it is not carried out. To a Warm, `pulled_tokens` were read from the
    source, `pulled_bytes` their KV; None if the engine does not report its size."""

    refused: str | None = None
    pulled_tokens: int = 0
    pulled_bytes: int | None = None


MigrationRequest = Reserve | Warm | CancelReservation
"""Requests of a frontend on a worker's subject for migrations."""
