"""Endpoints for tests of the planner, and a simulated server with several of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.fleet.rates import Reading
from dynamo_local.core.messages.endpoints import EndpointState, EndpointStatus, EndpointView
from dynamo_local.core.messages.work import QueueLength
from dynamo_local.core.planning.decide import Memories, Planned, decide
from dynamo_local.core.planning.decision import Decision
from dynamo_local.core.planning.options import PlannerOptions
from dynamo_local.core.planning.window import (
    EndpointSeen,
    Fleet,
    Observation,
    Standing,
    WorkerSeen,
    main_of,
    worker_roles,
)

KV_TOKENS = 32_768


def spec(name: str = "chat", **fields: Any) -> EndpointSpec:
    """Return an endpoint with 1 to 8 workers unless the fields say otherwise."""
    return EndpointSpec(**{"name": name, "model": "model", "max_workers": 8, **fields})


def workers(
    name: str, number: int, role: str = "aggregated", *, standing: Standing = "routable", kv: float | None = 0.7
) -> tuple[WorkerSeen, ...]:
    """Return so many workers of an endpoint's first revision. `kv` None: their loads are unknown."""
    reading = None if kv is None else Reading(8, 0, kv, 0.1, 0)
    service = "PrefillWorker" if role == "prefill" else "VllmWorker"
    return tuple(
        WorkerSeen(f"ns_{name}@1_{service}_{index}", role, standing, 1, reading, KV_TOKENS)
        for index in range(1, number + 1)
    )


def seen(
    ordered: EndpointSpec,
    running: Iterable[WorkerSeen] | None = None,
    *,
    in_flight: int | None = 0,
    queued: int = 0,
    queue: QueueLength | None = None,
    wanted: int | None = None,
    wanted_prefill: int = 0,
    state: EndpointState = "ready",
    created_at: float = 0.0,
    at: float = 0.0,
) -> EndpointSeen:
    """Return an endpoint at a pull. By default its minimum was ordered and runs."""
    present = workers(ordered.name, ordered.min_workers) if running is None else tuple(running)
    told = sum(worker.role != "prefill" for worker in present) if wanted is None else wanted
    status = EndpointStatus(state, wanted=told, wanted_prefill=wanted_prefill)
    fleet = Fleet(at, present, queue, dict.fromkeys(worker_roles(ordered), "VllmWorker"))
    return EndpointSeen(EndpointView(ordered, status, created_at, created_at), fleet, in_flight, queued=queued)


def pull(*endpoints: EndpointSeen, at: float = 0.0, own: int | None = 0, inventory: int = 8) -> Observation:
    """Return an observation of these endpoints. `own`: devices of the graph's own worker, if it has one; None: the
    statefile cannot be read."""
    mine = None if own is None else (WorkerSeen("ns_VllmWorker", "aggregated", "routable", own),)
    main = () if own == 0 else (main_of(Fleet(at, mine, None, {"aggregated": "VllmWorker"})),)
    seen = (*main, *(replace(each, fleet=replace(each.fleet, at=at)) for each in endpoints))
    held = [each.fleet.devices for each in seen]
    known = [devices for devices in held if devices is not None]
    return Observation(at, seen, sum(known) if len(known) == len(held) else None, inventory)


def order_of(planned: Planned) -> int:
    """Return the number of workers that is ordered of the only role of the only endpoint."""
    (decision,) = planned.decisions
    count = decision.verdicts[0].count
    assert count is not None
    return count.order


def decided(observation: Observation, options: PlannerOptions | None = None) -> dict[str, Decision]:
    """Decide at a first pull, and return the decisions by endpoint."""
    planned = decide(observation, {}, options or PlannerOptions())
    return {decision.endpoint: decision for decision in planned.decisions}


@dataclass
class LivingEndpoints:
    """A simulated server. Workers start and end within one pull; `demands` are requests in flight by endpoint."""

    specs: list[EndpointSpec]
    options: PlannerOptions = field(default_factory=PlannerOptions)
    inventory: int = 8
    own: int = 0
    kv: float = 0.7
    now: float = 0.0
    demands: dict[str, int | None] = field(default_factory=dict)
    queued: dict[str, int] = field(default_factory=dict)
    states: dict[str, EndpointState] = field(default_factory=dict)
    running: dict[str, int] = field(default_factory=dict)
    memories: Memories = field(default_factory=dict)

    def pull(self, seconds: float = 1.0) -> dict[str, Decision]:
        """Let time pass, then pull, decide and carry out the orders."""
        self.now += seconds
        endpoints = [
            seen(
                each,
                workers(each.name, self.running.setdefault(each.name, each.min_workers), kv=self.kv),
                in_flight=self.demands.get(each.name, 0),
                queued=self.queued.get(each.name, 0),
                state=self.states.get(each.name, "ready"),
                created_at=float(number),
            )
            for number, each in enumerate(self.specs)
        ]
        planned = decide(
            pull(*endpoints, at=self.now, own=self.own, inventory=self.inventory), self.memories, self.options
        )
        self.memories = planned.memories
        for decision in planned.decisions:
            if decision.order is not None and decision.order.workers is not None:
                self.running[decision.endpoint] = decision.order.workers
        return {decision.endpoint: decision for decision in planned.decisions}


def with_fields(ordered: EndpointSpec, **fields: Any) -> EndpointSpec:
    """Return a changed order."""
    return msgspec.structs.replace(ordered, **fields)
