"""Why a request went to its worker: the figures of an assignment, and the reason in words. Pure."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from dynamo_local.core.http.asgi import Scope
from dynamo_local.core.messages.routing import MOST_CANDIDATES, Assignment, AssignRequest, RouteRow, WeighedWorker
from dynamo_local.core.names import short_watcher

NamedWorker = Callable[[str], str]
"""From a worker's lease to its name."""


class ExplainedRoute(msgspec.Struct, frozen=True, kw_only=True):
    """An assignment as JSON tells it to operators. Workers are named by their watchers, `<namespace>_<Service>`; in
    `why` without the namespace, as in tables."""

    worker: str | None
    """None: no worker was ready."""
    tokens: int
    cached: int | None
    """Tokens that the worker was expected to have cached. None: the policy does not ask."""
    pull_from: str | None
    """The worker from which it was to pull more."""
    why: str
    candidates: tuple[WeighedWorker, ...]
    """The cheapest first."""
    left_out: int
    """Number of candidates beside those in `candidates`, of higher costs."""


def explained(route: RouteRow, name: NamedWorker) -> ExplainedRoute:
    """Name the workers of an assignment, and say why this one was chosen. `name`: from a lease to a watcher."""
    return ExplainedRoute(
        worker=None if route.worker is None else name(route.worker),
        tokens=route.tokens,
        cached=route.cached,
        pull_from=None if route.pull_from is None else name(route.pull_from),
        why=why(route, lambda lease: short_watcher(name(lease))),
        candidates=tuple(replace(each, worker=name(each.worker)) for each in route.candidates),
        left_out=route.left_out,
    )


def route_row(
    request: AssignRequest,
    assignment: Assignment,
    costs: Sequence[WeighedWorker],
    *,
    revision: str = "",
    age_s: float = 0.0,
) -> RouteRow:
    """An assignment with its candidates. `costs`: of all of them."""
    # The chosen one is among them even if cheaper ones have just failed the request.
    ordered = sorted(costs, key=lambda each: (each.worker != assignment.worker, each.cost))[:MOST_CANDIDATES]
    return RouteRow(
        request_id=request.request_id,
        revision=revision,
        frontend=request.frontend,
        tokens=request.tokens,
        age_s=age_s,
        worker=assignment.worker,
        cached=assignment.cached,
        pull_from=assignment.pull_from,
        candidates=tuple(
            replace(each, failed=each.worker in request.avoid) for each in sorted(ordered, key=lambda each: each.cost)
        ),
        left_out=len(costs) - len(ordered),
    )


def why(route: RouteRow, name: NamedWorker) -> str:
    """Why this worker was chosen."""
    chosen = next((each for each in route.candidates if each.worker == route.worker), None)
    if chosen is None:
        return "no worker was ready"
    others = [each for each in route.candidates if each is not chosen]
    reasons = [_by_cost(chosen, [each for each in others if not each.failed], name)]
    reasons += [f"{name(each.worker)} had just failed the request" for each in others if each.failed]
    if route.cached is not None:
        reasons += _by_prefix(route, chosen, others, name)
    return "; ".join(reasons)


def _by_cost(chosen: WeighedWorker, rivals: list[WeighedWorker], name: NamedWorker) -> str:
    if not rivals:
        return "no other worker was ready"
    equals = sum(each.cost == chosen.cost for each in rivals)
    if equals:
        return f"one of {equals + 1} with the lowest cost"
    second = min(rivals, key=lambda each: each.cost)
    return f"its cost was the lowest, {name(second.worker)}'s the second"


def _by_prefix(route: RouteRow, chosen: WeighedWorker, others: list[WeighedWorker], name: NamedWorker) -> list[str]:
    if route.pull_from is not None:
        return [f"it pulls what it lacks of the prefix from {name(route.pull_from)}"]
    most = max(others, key=lambda each: each.cached, default=chosen)
    if most.cached > chosen.cached:
        return [f"{name(most.worker)} has {most.cached - chosen.cached} more tokens of the prefix, and more to do"]
    if chosen.cached:
        return [f"it has {chosen.cached} tokens of the prefix, and nobody has more"]
    return ["nobody has the prefix"]


# The header that explains where a request went, in JSON and of bounded size. Pure.

EXPLAIN, ROUTE = b"x-dynamo-explain", b"x-dynamo-route"
"""Headers of requests that ask where they go, and of their answers."""

MOST_BYTES = 2_048
"""Bound on the header's value: proxies take 4 to 8 kB of headers in all."""


def is_asked(value: bytes) -> bool:
    """Whether the value of a request's header asks for the explanation."""
    return value.strip().lower() in (b"1", b"true")


def is_local(scope: Scope) -> bool:
    """Whether a request comes from this machine. One by a unix socket, which has no address, does."""
    client = scope.get("client")
    if client is None:
        return True
    try:
        return ipaddress.ip_address(client[0]).is_loopback
    except ValueError:
        return False


def header_value(routes: Sequence[dict[str, Any]]) -> bytes:
    """The header's value: a list with an assignment for each sequence of the request, or again where it went later.

    Left out first are the candidates of the highest costs, then the latest assignments.
    """
    kept = list(routes)
    most = max((len(route["candidates"]) for route in kept), default=0)
    while len(value := _told(kept, most)) > MOST_BYTES:
        if most:
            most -= 1
        else:
            kept.pop()
    return value


def described(route: RouteRow, name: NamedWorker) -> dict[str, Any]:
    """An assignment as the header tells it, with the names and words of `dynamo route --json`."""
    told: dict[str, Any] = msgspec.to_builtins(explained(route, name))
    return told


def _told(routes: Sequence[dict[str, Any]], candidates: int) -> bytes:
    told = [_with_candidates(route, candidates) for route in routes]
    return json.dumps(told, separators=(",", ":")).encode("ascii")


def _with_candidates(route: dict[str, Any], most: int) -> dict[str, Any]:
    candidates = route["candidates"]
    left_out = route["left_out"] + max(len(candidates) - most, 0)
    return {**route, "candidates": candidates[:most], "left_out": left_out}
