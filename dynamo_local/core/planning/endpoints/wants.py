"""The number of workers that an endpoint's policy asks for in each role, whatever there is room for. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from dynamo_local.core.fleet.view import PREFILL_ROLE
from dynamo_local.core.planning.endpoints.memory import Memory, Proposed
from dynamo_local.core.planning.endpoints.observation import EndpointSeen, bounds_of
from dynamo_local.core.planning.options import PlannerOptions
from dynamo_local.core.planning.policies import freeness, load
from dynamo_local.core.planning.proposals import Policy, Proposal, why_starting
from dynamo_local.core.planning.window import History, RoleWindow, Window

STEPWISE: Mapping[str, Policy] = MappingProxyType({"load": load.propose, "freeness": freeness.propose})
"""Policies that propose one worker more or less at the end of each adjustment interval. The other one, `concurrency`,
names a number at every pull."""

_ROUNDING = 1e-9
"""Quotients this close above a whole number are that number."""


@dataclass(frozen=True)
class Want:
    """Number of workers wanted in a role, and why. `figures`: the numbers of the reason by name; None is unknown."""

    workers: int
    reason: str
    figures: Mapping[str, float | None] = field(default_factory=dict)


def wants_of(
    seen: EndpointSeen, memory: Memory, ordered: Mapping[str, int], options: PlannerOptions
) -> tuple[dict[str, Want], Memory]:
    """Return the want of each role, within the endpoint's bounds, and the memory with this pull added.

    `ordered`: by role, the number of workers that the server was told to run.
    """
    memory = memory.read(seen, options)
    if seen.spec.policy in STEPWISE:
        memory = _proposed(seen, memory, ordered, options)
        wants = {role: _stepwise(memory.proposed.get(role), ordered[role]) for role in ordered}
    else:
        memory = memory.without_proposals()
        wants = {role: _by_concurrency(seen, role, memory, ordered[role], options) for role in ordered}
    return {role: _bounded(want, *bounds_of(seen.spec, role)) for role, want in wants.items()}, memory


def _by_concurrency(seen: EndpointSeen, role: str, memory: Memory, ordered: int, options: PlannerOptions) -> Want:
    prefill = role == PREFILL_ROLE
    demand, window_s = memory.demand(role), options.endpoint_concurrency_window
    figures: dict[str, float | None] = {"in_flight": demand.now, "most_in_flight": demand.most}
    if demand.most is None:
        what = "the prefill queue" if prefill else "the number of requests in flight"
        return Want(ordered, f"hold: {what} cannot be read", figures)
    per_worker = options.prefill_requests_per_worker if prefill else seen.spec.requests_per_worker
    needed = math.ceil(demand.most / per_worker - _ROUNDING)
    what = "jobs in flight" if prefill else "requests in flight"
    if seen.queued and not prefill:
        what = "requests in flight and tasks queued"
    reason = f"at most {demand.most:g} {what} in {window_s:g} s, {per_worker:g} per worker"
    if needed < ordered and demand.watched_s < window_s:
        return Want(ordered, f"{reason}, but they have been watched for {demand.watched_s:.0f} s only", figures)
    return Want(needed, reason, figures)


def _stepwise(proposed: Proposed | None, ordered: int) -> Want:
    if proposed is None or not proposed.holds(ordered):
        return Want(ordered, "hold: these workers have not been watched for an interval")
    return Want(proposed.wanted, proposed.proposal.reason, proposed.proposal.figures)


def _proposed(seen: EndpointSeen, memory: Memory, ordered: Mapping[str, int], options: PlannerOptions) -> Memory:
    """Return the memory with this pull, and with new proposals if an interval ends with it."""
    history = memory.history
    memory, window = memory.pulled(seen.fleet, options)
    if window is None:
        return memory
    policy = STEPWISE[seen.spec.policy]
    found = {
        role: Proposed(ordered[role], _proposal(policy, window.role(role), window, history, options))
        for role in ordered
    }
    return replace(memory, proposed=found)


def _proposal(
    policy: Policy, role: RoleWindow | None, window: Window, history: History, options: PlannerOptions
) -> Proposal:
    if role is None:
        return Proposal(0, "hold: statefile or bus cannot be read")
    proposal = policy(role, window, history, options)
    if proposal.wanted and (why := why_starting(role, history)) is not None:
        return replace(proposal, wanted=0, reason=f"{proposal.reason}, but {why}")
    return proposal


def _bounded(want: Want, lowest: int, highest: int) -> Want:
    if want.workers < lowest:
        return replace(want, workers=lowest, reason=f"{want.reason}; the minimum is {lowest}")
    if want.workers > highest:
        needed = f"{want.workers} needed, the maximum is {highest}"
        return replace(want, workers=highest, reason=f"{want.reason}; {needed}")
    return want
