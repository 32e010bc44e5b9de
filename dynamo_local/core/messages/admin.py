"""Messages of operators and planner to servers, frontends and workers."""

from __future__ import annotations

import msgspec

from dynamo_local.core.codec import VERSION


class RoleQuestion(msgspec.Struct, frozen=True):
    """Take up this role."""

    role: str
    v: int = VERSION


class RoleAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The role that the worker has now; `refused` says why it is not the one asked for."""

    role: str
    refused: str | None = None
    v: int = VERSION


class HoldQuestion(msgspec.Struct, frozen=True):
    """Hold on the machine what the statefile says, and let go of the rest."""

    v: int = VERSION


class Holds(msgspec.Struct, frozen=True):
    """By device: who holds it on the machine, where that is somebody else."""

    refused: dict[int, str]
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


class MigrationOrder(msgspec.Struct, frozen=True, omit_defaults=True, tag="move"):
    """Move these requests, or all that `source` (a lease) works on; to `destination` (a lease), or to whoever has most
    room. Requests that the frontend does not have are passed over. `cold`: without their KV, which is computed there.
    """

    request_ids: tuple[str, ...] = ()
    source: str | None = None
    destination: str | None = None
    cold: bool = False
    v: int = VERSION


class MigrationResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became of one request. `outcome` is a `moves.Outcome`; `warm_s` from the beginning to the cut, `gap_s` from
    the last token before the cut to the first one after it."""

    request_id: str
    outcome: str
    why: str
    destination: str | None = None
    warm_s: float | None = None
    gap_s: float | None = None
    gap_steps: float | None = None


class MigrationReport(msgspec.Struct, frozen=True):
    results: tuple[MigrationResult, ...]
    v: int = VERSION


AdminRequest = RequestsQuestion | MigrationOrder
"""Requests of an operator on a frontend's subject."""
