"""Turns observations of endpoints and decisions about them into named numbers and text. Pure.

Names are `endpoint_NAME/number`: TensorBoard shows the curves of an endpoint together. What is unknown has no number.
"""

from __future__ import annotations

from collections.abc import Sequence

from dynamo_local.core.fleet.view import PREFILL_ROLE
from dynamo_local.core.planning.endpoints.decision import EndpointDecision, OrderOutcome, RoleVerdict
from dynamo_local.core.planning.endpoints.observation import EndpointSeen, EndpointsObservation, roles_of


def of_endpoints(observation: EndpointsObservation, decisions: Sequence[EndpointDecision]) -> dict[str, float]:
    """Return the numbers of a pull, by name."""
    found: dict[str, float] = {}
    for seen in observation.endpoints:
        found |= _of_endpoint(seen)
    for decision in decisions:
        for verdict in decision.verdicts:
            found[_name(decision.endpoint, verdict.role, "wanted")] = verdict.wanted
            found[_name(decision.endpoint, verdict.role, "share")] = verdict.gets
    return found


def text_of_endpoint(decision: EndpointDecision, outcome: OrderOutcome | None) -> str:
    """Return a decision in Markdown: its change, what became of it, and the reasons with all figures."""
    devices = "unknown" if decision.devices is None else f"{decision.devices:g}"
    lines = [f"**{decision.change}** (policy {decision.policy}, devices {devices} of {decision.max_devices})", ""]
    if outcome is not None:
        lines.append(f"- {'done' if outcome.done else f'not done: {outcome.note}'}")
    for verdict in decision.verdicts:
        lines += [f"- {verdict.role}: {verdict.reason}", *_figures(verdict)]
    return "\n".join(lines)


def _of_endpoint(seen: EndpointSeen) -> dict[str, float]:
    found: dict[str, float] = {}
    if roles_of(seen.spec):
        found[f"endpoint_{seen.name}/parked"] = seen.status.parked
        found[f"endpoint_{seen.name}/asleep"] = float(seen.status.state == "asleep")
        found |= {f"endpoint_{seen.name}/{name}": number for name, number in _history(seen).items()}
        if seen.held is not None:
            found[f"endpoint_{seen.name}/held"] = seen.held
    for role in roles_of(seen.spec):
        ready, demand = seen.ready(role), seen.demand(role)
        found[_name(seen.name, role, "ordered")] = seen.ordered(role)
        if ready is not None:
            found[_name(seen.name, role, "ready")] = ready
        if demand is not None:
            found[_name(seen.name, role, "in_flight")] = demand
    return found


def _history(seen: EndpointSeen) -> dict[str, float]:
    """How often it was parked and woken, and gave its devices to others, since the server started."""
    history = seen.view.history
    return {"parks": sum(history.parks.values()), "wakes": sum(history.wakes.values()), "swaps": history.swaps}


def _figures(verdict: RoleVerdict) -> list[str]:
    return [
        f"    - {name}: {'unknown' if figure is None else f'{figure:g}'}" for name, figure in verdict.figures.items()
    ]


def _name(endpoint: str, role: str, number: str) -> str:
    of_role = f"{PREFILL_ROLE}_{number}" if role == PREFILL_ROLE else number
    return f"endpoint_{endpoint}/{of_role}"
