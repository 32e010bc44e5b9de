"""Why a request went to its worker, in words, from the figures of an assignment. Pure."""

from __future__ import annotations

from collections.abc import Callable

from dynamo_local.core.messages.routes import RouteRow, WeighedWorker

NamedWorker = Callable[[str], str]
"""From a worker's lease to its name."""


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
