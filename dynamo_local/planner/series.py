"""Turns the planner's observations and decisions into named numbers and text. Pure.

Names are `group/name`: TensorBoard shows the curves of a group together. What is unknown has no number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from dynamo_local.core.fleet.view import PREFILL_ROLE, RoutingCounts
from dynamo_local.core.messages.presence import MigrationCounts
from dynamo_local.core.planning.actions import ActionOutcome
from dynamo_local.core.planning.decision import Decision, Verdict, describe
from dynamo_local.core.planning.endpoints.decision import (
    EndpointDecision,
    EndpointSeen,
    EndpointsObservation,
    OrderOutcome,
    RoleVerdict,
    roles_of,
)
from dynamo_local.core.planning.policies.dynamo import kv_load
from dynamo_local.core.planning.window import Observation, QueueReading, WorkerSeen

STANDINGS = ("routable", "starting", "parked", "retiring")


def of_observation(observation: Observation) -> dict[str, float]:
    """Return the numbers of a pull, by name."""
    found: dict[str, float] = {}
    if observation.queue is not None:
        found |= _queue(observation.queue, observation.of_role(PREFILL_ROLE))
    if observation.inventory is not None:
        found["devices/inventory"] = observation.inventory
    if observation.migrations is not None:
        found |= _migrations(observation.migrations)
    if observation.routing is not None:
        found |= _routing(observation.routing)
    if observation.recomputed_tokens is not None:
        found["routing/recomputed_tokens"] = observation.recomputed_tokens
    if observation.workers is None:
        return found
    if observation.devices is not None:
        found["devices/held"] = observation.devices
    for role in sorted({*observation.templates, *(worker.role for worker in observation.workers)}):
        found |= _role(role, observation.of_role(role))
    for worker in observation.workers:
        found |= _loads(worker)
    return found


def of_observation_as_dynamo(observation: Observation) -> dict[str, float]:
    """Return the numbers of a pull by the names of NVIDIA Dynamo's planner.

    Source: https://github.com/ai-dynamo/dynamo, examples/llm/components/planner.py. Its documentation calls
    `total_queued_requests` by another name, num_queued_request.
    """
    found: dict[str, float] = {}
    if observation.queue is not None:
        found["prefill_queue_size"] = observation.queue.waiting
    if observation.workers is None:
        return found
    routable = [worker for worker in observation.workers if worker.standing == "routable"]
    prefill = sum(worker.role == PREFILL_ROLE for worker in routable)
    found["num_prefill_workers"], found["num_decode_workers"] = prefill, len(routable) - prefill
    found["num_gpu"] = sum(worker.devices for worker in routable)
    loads = [worker.reading for worker in routable if worker.role != PREFILL_ROLE and worker.reading is not None]
    if loads:
        found["average_kv_load"] = sum(kv_load(load.kv_usage, load.waiting) for load in loads) / len(loads)
        found["total_queued_requests"] = sum(load.waiting for load in loads)
    return found


def of_decision(decision: Decision) -> dict[str, float]:
    """Return the figures that a decision was made from, and each role's wanted change (1, 0 or -1), by name."""
    found: dict[str, float] = {"devices/budget": decision.max_devices}
    for verdict in decision.verdicts:
        found[f"decision/{verdict.role}_wanted"] = verdict.wanted
        for name, figure in verdict.figures.items():
            if figure is not None:
                found[f"decision/{verdict.role}_{name.replace(' ', '_')}"] = figure
    return found


def text_of(decision: Decision, outcomes: Sequence[ActionOutcome]) -> str:
    """Return a decision in Markdown: its actions, their outcomes, and the reasons with all figures."""
    devices = "unknown" if decision.devices is None else f"{decision.devices:g}"
    lines = [f"**{decision.change}** (policy {decision.policy}, devices {devices} of {decision.max_devices})", ""]
    lines += [f"- {_became(outcome)}" for outcome in outcomes]
    lines += [line for verdict in decision.verdicts for line in _why(verdict)]
    return "\n".join(lines)


def _queue(queue: QueueReading, prefill: Sequence[WorkerSeen]) -> dict[str, float]:
    found: dict[str, float] = {"queue/waiting": queue.waiting, "queue/in_hand": queue.in_hand}
    routable = sum(worker.standing == "routable" for worker in prefill)
    if routable:
        found["queue/waiting_per_prefill_worker"] = queue.waiting / routable
    return found


def _migrations(counts: MigrationCounts) -> dict[str, float]:
    found: dict[str, float] = {f"migrations/{each.reason}_{each.outcome}": each.number for each in counts.ended}
    found["migrations/pulled_mib"] = counts.pulled_bytes / (1 << 20)
    if counts.gap_s is not None:
        found["migrations/last_gap_ms"] = counts.gap_s * 1e3
    if counts.gap_steps is not None:
        found["migrations/last_gap_steps"] = counts.gap_steps
    return found


def _routing(counts: RoutingCounts) -> dict[str, float]:
    found: dict[str, float] = {
        "routing/assigned": counts.assigned,
        "routing/unassigned": counts.unassigned,
        "routing/tokens": counts.tokens,
        "routing/predicted_cached_tokens": counts.predicted_tokens,
        "routing/pull_tokens": counts.pull_tokens,
    }
    if counts.tokens:
        found["routing/predicted_cached_share"] = counts.predicted_tokens / counts.tokens
    return found


def _role(role: str, workers: Sequence[WorkerSeen]) -> dict[str, float]:
    found: dict[str, float] = {
        f"workers/{role}_{standing}": sum(worker.standing == standing for worker in workers) for standing in STANDINGS
    }
    readings = [worker.reading for worker in workers if worker.reading is not None]
    if readings:
        found[f"kv_usage/mean_{role}"] = sum(reading.kv_usage for reading in readings) / len(readings)
        found[f"running/all_{role}"] = sum(reading.running for reading in readings)
        found[f"waiting/all_{role}"] = sum(reading.waiting for reading in readings)
    return found


def _loads(worker: WorkerSeen) -> Mapping[str, float]:
    reading = worker.reading
    if reading is None:
        return {}
    return {
        f"kv_usage/{worker.watcher}": reading.kv_usage,
        f"running/{worker.watcher}": reading.running,
        f"waiting/{worker.watcher}": reading.waiting,
    }


def _became(outcome: ActionOutcome) -> str:
    word = "done" if outcome.done else "not done"
    note = f": {outcome.note}" if outcome.note else ""
    return f"{describe(outcome.action)}: {word} in {outcome.took_s:.1f} s{note}"


def _why(verdict: Verdict) -> Iterator[str]:
    wanted = {1: "one more", -1: "one less"}.get(verdict.wanted, "as many")
    yield f"- {verdict.role}: {wanted}: {verdict.reason}"
    for name, figure in verdict.figures.items():
        yield f"    - {name}: {'unknown' if figure is None else f'{figure:g}'}"


# Turns observations of endpoints and decisions about them into named numbers and text. Pure.
#
# Names are `endpoint_NAME/number`: TensorBoard shows the curves of an endpoint together. What is unknown has no number.


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
