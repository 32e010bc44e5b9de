"""Messages between frontends and the router."""

from __future__ import annotations

import msgspec

from dynamo_local.core.codec import Message
from dynamo_local.core.messages.routes import RouteRow


class AssignRequest(Message, frozen=True, omit_defaults=True):
    """Question for the worker to take a request. `avoid`: leases of workers that have just failed it.

    `blocks`: keys of the full blocks of its context (core/routing/caches/index.py), in order, each of
    `block_tokens` tokens. Empty if they are not known, or not needed by the router's policy.
    """

    request_id: str
    frontend: str
    tokens: int
    avoid: tuple[str, ...] = ()
    blocks: bytes = b""
    block_tokens: int = 0
    explain: bool = False
    """Whether the answer is to have `Assignment.route`."""


class Assignment(Message, frozen=True, omit_defaults=True):
    """The lease of the worker to take the request; None if no worker is routable."""

    worker: str | None
    cached: int | None = None
    """Leading tokens of the context that the worker is expected to have cached. None: not known."""
    pull_from: str | None = None
    """Lease of another worker from which it had better pull the prefix. None: the worker pulls as it sees fit."""
    needs_blocks: bool = True
    """Whether the router's policy looks at `AssignRequest.blocks`."""
    route: RouteRow | None = None
    """What was weighed. None: not asked for."""
    order: int = 0
    """See Charge."""
    tell: bool = False
    """Whether there are further routers, which are to be told (Charged)."""


class Charge(msgspec.Struct, frozen=True, array_like=True):
    """A request counted as load of a worker, with its tokens.

    `uncached`: tokens of its context that the worker has still to compute, 0 once its first token has come. None: not
    known; they are taken for all.
    """

    request_id: str
    worker: str
    tokens: int
    uncached: int | None = None
    age_s: float = 0.0
    """Time since the assignment, when the message was sent."""
    order: int = 0
    """Number of the assignment: higher than those of all assignments that its router had heard of."""


class Charged(Message, frozen=True, omit_defaults=True):
    """A router has assigned a request: told by the frontend, for the other routers. `blocks` as in AssignRequest."""

    frontend: str
    charge: Charge
    blocks: bytes = b""


class Charges(Message, frozen=True):
    """All requests of a frontend that workers have. Sent at intervals, so that lost messages do no lasting harm."""

    frontend: str
    charges: tuple[Charge, ...]


class Released(Message, frozen=True):
    """The request is no longer load of the worker to which it was assigned."""

    request_id: str
    frontend: str


class Prefilled(Message, frozen=True):
    """The request's first token has come: its worker has no more of its context to compute."""

    request_id: str
    frontend: str
