"""Messages between frontends and the destinations of migrations (core/migration/protocol.py)."""

from __future__ import annotations

import msgspec

from dynamo_local.core.codec import VERSION


class Reserve(msgspec.Struct, frozen=True, omit_defaults=True, tag="reserve"):
    """Keep a run slot and blocks for `tokens` tokens until `until` (CLOCK_MONOTONIC, s), or until the request is
    submitted, or given back, or until `frontend`, whose request it is, is gone. A second one for the same request
    replaces the first.

    `floor`: only if the worker's freeness, in steps, stays at that with all its guests. The asker may not know of
    those of others.
    """

    request_id: str
    frontend: str
    tokens: int
    until: float
    floor: float | None = None
    v: int = VERSION


class Warm(msgspec.Struct, frozen=True, omit_defaults=True, tag="warm"):
    """Have the KV of `token_ids` at hand: pull its full blocks from `source`, compute the rest. The request must have
    been reserved for. Answered when it is there; it is kept for as long as the room is.

    After `until` (CLOCK_MONOTONIC, s) nobody waits for the answer.
    """

    request_id: str
    source: str
    token_ids: list[int]
    until: float
    cache_salt: str | None = None
    adapter: str | None = None
    priority: int = 0
    v: int = VERSION


class CancelReservation(msgspec.Struct, frozen=True, tag="give_back"):
    """The request does not come. Unknown ones are ignored."""

    request_id: str
    v: int = VERSION


class MigrationAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """It is done; or `refused` says why it is not. `pulled_tokens`: of a Warm, read from the source; `pulled_bytes`: as
    far as the engine tells."""

    refused: str | None = None
    pulled_tokens: int = 0
    pulled_bytes: int | None = None
    v: int = VERSION


MigrationRequest = Reserve | Warm | CancelReservation
"""Requests of a frontend on a worker's subject for migrations."""
