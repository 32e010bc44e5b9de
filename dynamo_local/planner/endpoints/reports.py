"""Turns observations of endpoints and decisions about them into the planner's reports. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo_local.core.fleet.view import PREFILL_ROLE
from dynamo_local.core.messages.planner import EndpointReport
from dynamo_local.core.planning.endpoints.decide import rests
from dynamo_local.core.planning.endpoints.decision import EndpointDecision
from dynamo_local.core.planning.endpoints.observation import EndpointsObservation, roles_of


def endpoint_reports(
    observation: EndpointsObservation, decisions: Sequence[EndpointDecision]
) -> tuple[EndpointReport, ...]:
    """Return a report for each role of each endpoint, the oldest endpoint first."""
    resting = {seen.name for seen in observation.endpoints if rests(seen)}
    verdicts = {
        (each.endpoint, verdict.role): verdict
        for each in decisions
        for verdict in each.verdicts
        if each.endpoint not in resting
    }
    return tuple(
        EndpointReport(
            seen.name,
            role,
            seen.ordered(role),
            seen.ready(role),
            seen.demand(role),
            None if verdict is None else verdict.wanted,
            None if verdict is None else verdict.gets,
            0 if role == PREFILL_ROLE else seen.status.parked,
            seen.status.state,
        )
        for seen in sorted(observation.endpoints, key=lambda seen: (seen.view.created_at, seen.name))
        for role in roles_of(seen.spec)
        for verdict in (verdicts.get((seen.name, role)),)
    )
