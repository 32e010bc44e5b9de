"""What the planner sees and decides, as named numbers and as text. Pure.

Names are `group/name`: TensorBoard shows a group's curves together. What is unknown has no number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from dynamo_local.core.fleet.view import PREFILL_ROLE
from dynamo_local.core.messages.presence import MigrationCounts
from dynamo_local.core.planning.actions import ActionOutcome
from dynamo_local.core.planning.decision import Decision, Verdict, describe
from dynamo_local.core.planning.observation import Observation, QueueReading, WorkerSeen

STANDINGS = ("routable", "starting", "retiring")


def of_observation(observation: Observation) -> dict[str, float]:
    """Everything that a pull has found."""
    found: dict[str, float] = {}
    if observation.queue is not None:
        found |= _queue(observation.queue, observation.of_role(PREFILL_ROLE))
    if observation.inventory is not None:
        found["devices/inventory"] = observation.inventory
    if observation.moves is not None:
        found |= _moves(observation.moves)
    if observation.workers is None:
        return found
    if observation.devices is not None:
        found["devices/held"] = observation.devices
    for role in sorted({*observation.templates, *(worker.role for worker in observation.workers)}):
        found |= _role(role, observation.of_role(role))
    for worker in observation.workers:
        found |= _loads(worker)
    return found


def of_decision(decision: Decision) -> dict[str, float]:
    """The numbers that a decision was made from, and what each role wanted."""
    found: dict[str, float] = {"devices/budget": decision.max_devices}
    for verdict in decision.verdicts:
        found[f"decision/{verdict.role}_wanted"] = verdict.wanted
        for name, figure in verdict.figures.items():
            if figure is not None:
                found[f"decision/{verdict.role}_{name.replace(' ', '_')}"] = figure
    return found


def text_of(decision: Decision, outcomes: Sequence[ActionOutcome]) -> str:
    """A decision in Markdown: what is done, what became of it, and why, with all numbers."""
    changes = ", ".join(map(describe, decision.changes)) or "no change"
    devices = "unknown" if decision.devices is None else str(decision.devices)
    lines = [f"**{changes}** (policy {decision.policy}, devices {devices} of {decision.max_devices})", ""]
    lines += [f"- {_became(outcome)}" for outcome in outcomes]
    lines += [line for verdict in decision.verdicts for line in _why(verdict)]
    return "\n".join(lines)


def _queue(queue: QueueReading, prefill: Sequence[WorkerSeen]) -> dict[str, float]:
    found: dict[str, float] = {"queue/waiting": queue.waiting, "queue/in_hand": queue.in_hand}
    routable = sum(worker.standing == "routable" for worker in prefill)
    if routable:
        found["queue/waiting_per_prefill_worker"] = queue.waiting / routable
    return found


def _moves(moves: MigrationCounts) -> dict[str, float]:
    found: dict[str, float] = {f"moves/{each.reason}_{each.outcome}": each.number for each in moves.ended}
    found["moves/pulled_mib"] = moves.pulled_bytes / (1 << 20)
    if moves.gap_s is not None:
        found["moves/last_gap_ms"] = moves.gap_s * 1e3
    if moves.gap_steps is not None:
        found["moves/last_gap_steps"] = moves.gap_steps
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
    return f"{describe(outcome.change)}: {word} in {outcome.took_s:.1f} s{note}"


def _why(verdict: Verdict) -> Iterator[str]:
    wanted = {1: "one more", -1: "one less"}.get(verdict.wanted, "as many")
    yield f"- {verdict.role}: {wanted}: {verdict.reason}"
    for name, figure in verdict.figures.items():
        yield f"    - {name}: {'unknown' if figure is None else f'{figure:g}'}"
