"""Messages between operators and routers: the latest assignments, and what they were chosen by."""

from __future__ import annotations

import msgspec

from dynamo_local.core.codec import Message

MOST_CANDIDATES = 16
"""Bound on the candidates that are told of an assignment: the chosen one and the cheapest others."""


class RoutesQuestion(Message, frozen=True, omit_defaults=True):
    """Question for a router's latest assignments, the latest first, at most `limit`.

    `revisions`: those of these revisions only (an empty text: the graph's own model); None: of all.
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
