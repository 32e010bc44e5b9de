"""What processes tell each other about moves (moves.py). As in messages.py: frozen, versioned, msgpack.

frontend  -> worker     Reserve          keep room for a request of mine                    (reply: MoveAnswer)
frontend  -> worker     Warm             pull what another worker has of it                 (reply: MoveAnswer)
frontend  -> worker     GiveBack         it does not come
operator  -> frontend   RequestsQuestion who works on what?                                 (reply: RequestsAnswer)
operator  -> frontend   MoveOrder        move these                                         (reply: MoveReport)
"""

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


class GiveBack(msgspec.Struct, frozen=True, tag="give_back"):
    """The request does not come. Unknown ones are ignored."""

    request_id: str
    v: int = VERSION


class MoveAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """It is done; or `refused` says why it is not. `pulled_tokens`: of a Warm, read from the source; `pulled_bytes`: as
    far as the engine tells."""

    refused: str | None = None
    pulled_tokens: int = 0
    pulled_bytes: int | None = None
    v: int = VERSION


class RequestsQuestion(msgspec.Struct, frozen=True, tag="requests"):
    """Which requests does this frontend have? At most `limit` are told, the oldest first."""

    limit: int
    v: int = VERSION


class RequestRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request under way. `worker` is a lease; None: it waits for one, or for a prefill worker."""

    request_id: str
    epoch: int
    worker: str | None
    prompt_tokens: int
    tokens: int
    """Accepted so far."""
    age_s: float
    moving_to: str | None = None
    """Lease of a move's destination."""
    stays: str | None = None
    """Why it cannot be moved."""


class RequestsAnswer(msgspec.Struct, frozen=True):
    """`left_out`: how many more there are."""

    requests: tuple[RequestRow, ...]
    left_out: int
    v: int = VERSION


class MoveOrder(msgspec.Struct, frozen=True, omit_defaults=True, tag="move"):
    """Move these requests, or all that `source` (a lease) works on; to `destination` (a lease), or to whoever has most
    room. Requests that the frontend does not have are passed over. `cold`: without their KV, which is computed there.
    """

    request_ids: tuple[str, ...] = ()
    source: str | None = None
    destination: str | None = None
    cold: bool = False
    v: int = VERSION


class MoveResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became of one request. `outcome` is a `moves.Outcome`; `warm_s` from the beginning to the cut, `gap_s` from
    the last token before the cut to the first one after it."""

    request_id: str
    outcome: str
    why: str
    destination: str | None = None
    warm_s: float | None = None
    gap_s: float | None = None
    gap_steps: float | None = None


class MoveReport(msgspec.Struct, frozen=True):
    results: tuple[MoveResult, ...]
    v: int = VERSION


MoveWord = Reserve | Warm | GiveBack
"""What a frontend tells a worker on its subject for moves."""

Inquiry = RequestsQuestion | MoveOrder
"""What an operator asks a frontend on its subject for requests."""
