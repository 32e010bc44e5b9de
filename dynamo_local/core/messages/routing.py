"""Messages between frontends and routers, and what routers tell operators of their latest assignments."""

from __future__ import annotations

import msgspec

from dynamo_local.core.codec import Message

# Between operators and routers: the latest assignments, and what they were chosen by.


MOST_CANDIDATES = 16
"""Bound on the candidates that are told of an assignment: the chosen one and the cheapest others."""


class RoutesQuestion(Message, frozen=True, omit_defaults=True):
    """Question for a router's latest assignments, the latest first, at most `limit`.

    `revisions`: those of these revisions only; None: of all.
    """

    limit: int
    revisions: tuple[str, ...] | None = None


class WeighedWorker(msgspec.Struct, frozen=True, gc=False):
    """What a policy has weighed for one candidate, by its lease; told to an operator, by its watcher.

    The lowest `cost` wins. With the policy `kv` it is the expected time to the first token in seconds, the sum of
    `place_s` (until the worker can run the request), `prefill_s` (for the tokens queued before and those that it lacks)
    and `step_s`, which are None with other policies. `cached` and `uncached`: tokens of the request's context that the
    worker has, and would have to compute. `queued`: tokens that it has to compute before. `requests`: those that it
    has. `failed`: it had just failed the request, and is taken only if there is no other.
    """

    worker: str
    cost: float
    cached: int
    uncached: int
    queued: int
    requests: int
    failed: bool = False
    place_s: float | None = None
    prefill_s: float | None = None
    step_s: float | None = None


class RouteRow(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """An assignment. `candidates`: the cheapest first; `left_out`: number of further ones."""

    request_id: str
    revision: str = ""
    frontend: str
    tokens: int
    age_s: float
    worker: str | None
    """None: no worker was ready."""
    cached: int | None = None
    """Tokens of the context that the worker was expected to have cached. None: the policy does not ask."""
    pull_from: str | None = None
    candidates: tuple[WeighedWorker, ...] = ()
    left_out: int = 0


class RoutesAnswer(Message, frozen=True, omit_defaults=True):
    """A router's latest assignments, and its policy by name."""

    policy: str
    routes: tuple[RouteRow, ...]


# Between frontends and routers.


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


class Charged(Message, frozen=True, omit_defaults=True, tag="charged"):
    """A router has assigned a request: told by the frontend, for the other routers. `blocks` as in AssignRequest."""

    frontend: str
    charge: Charge
    blocks: bytes = b""


class Charges(Message, frozen=True, tag="charges"):
    """All requests of a frontend that workers have. Sent at intervals, so that lost messages do no lasting harm."""

    frontend: str
    charges: tuple[Charge, ...]


class Released(Message, frozen=True, tag="released"):
    """The request is no longer load of the worker to which it was assigned."""

    request_id: str
    frontend: str


class Prefilled(Message, frozen=True, tag="prefilled"):
    """The request's first token has come: its worker has no more of its context to compute."""

    request_id: str
    frontend: str


Account = Charged | Charges | Released | Prefilled
"""What a frontend tells routers of the load that it puts on workers, in the order in which it happens."""
