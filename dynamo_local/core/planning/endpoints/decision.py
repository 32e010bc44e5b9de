"""Endpoints as the planner observes them, the decisions about them, and the port to whatever shows both."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.fleet.view import AGGREGATED_ROLE, DECODE_ROLE, PREFILL_ROLE
from dynamo_local.core.messages.endpoints import EndpointStatus, EndpointView
from dynamo_local.core.messages.reports import Event
from dynamo_local.core.planning.decision import Recorder
from dynamo_local.core.planning.window import Observation, WorkerSeen

# Observations of all endpoints at a pull of the planner. What is unknown is None.


@dataclass(frozen=True)
class EndpointSeen:
    """An endpoint at one pull.

    `fleet`: the workers of all its revisions and its prefill queue, observed like those of a graph with the endpoint's
    roles. `in_flight`: requests that frontends have admitted and not finished, waiting ones included. `held`: those of
    them that wait for a worker. `queued`: asynchronous tasks beside them.
    """

    view: EndpointView
    fleet: Observation
    in_flight: int | None
    held: int | None = None
    queued: int = 0

    @property
    def spec(self) -> EndpointSpec:
        return self.view.spec

    @property
    def status(self) -> EndpointStatus:
        return self.view.status

    @property
    def name(self) -> str:
        return self.view.spec.name

    def workers(self, role: str) -> tuple[WorkerSeen, ...]:
        """The workers of a role; none if the workers are unknown."""
        return self.fleet.of_role(role)

    def ready(self, role: str) -> int | None:
        """Number of workers of a role that take requests; None if the workers are unknown."""
        if self.fleet.workers is None:
            return None
        return sum(worker.standing == "routable" for worker in self.workers(role))

    def ordered(self, role: str) -> int:
        """Number of workers of a role that the server has been told to run."""
        return self.status.wanted_prefill if role == PREFILL_ROLE else self.status.wanted

    def demand(self, role: str) -> int | None:
        """What the workers of a role have to do now: requests in flight, and queued tasks; for prefill workers the jobs
        in their queue and in their hands. None if that cannot be read."""
        if role != PREFILL_ROLE:
            return None if self.in_flight is None else self.in_flight + self.queued
        queue = self.fleet.queue
        return None if queue is None else queue.waiting + queue.in_hand


@dataclass(frozen=True)
class EndpointsObservation:
    """The endpoints of a server at one pull. `at` is CLOCK_MONOTONIC, in seconds. `board`: number of the board that
    lists them.

    `own_devices`: devices that the graph's own workers hold or are about to claim. `inventory`: number of devices.
    """

    at: float
    endpoints: tuple[EndpointSeen, ...]
    own_devices: float | None
    inventory: int | None = None
    board: int = 0

    @property
    def devices(self) -> float | None:
        """Number of devices that all workers hold together; None if unknown."""
        if self.own_devices is None or any(seen.fleet.workers is None for seen in self.endpoints):
            return None
        return self.own_devices + sum(seen.fleet.devices or 0 for seen in self.endpoints)


def roles_of(spec: EndpointSpec) -> tuple[str, ...]:
    """The roles of an endpoint's workers. An adapter of another endpoint has none."""
    if spec.adapter_of is not None:
        return ()
    return (DECODE_ROLE, PREFILL_ROLE) if spec.disaggregated else (AGGREGATED_ROLE,)


def bounds_of(spec: EndpointSpec, role: str) -> tuple[int, int]:
    """Lowest and highest number of workers in that role. Whether there is any worker is not the planner's to decide."""
    if role == PREFILL_ROLE:
        return spec.min_prefill_workers, spec.most_prefill_workers
    return spec.least_awake, spec.most_workers


# The decision about one endpoint at a pull: its order and its reasons. Plain data.

_NUMBER = re.compile(r"\d+(?:\.\d+)?")


@dataclass(frozen=True)
class ScaleEndpoint:
    """Order for so many workers now, within the endpoint's bounds. None: as many as before."""

    name: str
    workers: int | None = None
    prefill_workers: int | None = None


@dataclass(frozen=True)
class RoleVerdict:
    """The result for the workers of one role.

    `ordered`: their number before this decision. `wanted`: what the policy asks for. `gets`: its share of the budget.
    `order`: the number to run now, more than `ordered` only as far as devices are free. `ready`: workers that take
    requests. `reason` is a sentence with numbers; `figures` gives the same numbers by name. None: unknown.
    """

    role: str
    ordered: int
    wanted: int
    gets: int
    order: int
    ready: int | None
    reason: str
    figures: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def change(self) -> str:
        """The change in words, such as "4 prefill workers instead of 1"; empty if there is none."""
        if self.order == self.ordered:
            return ""
        workers = "worker" if self.order == 1 else "workers"
        kind = f"{PREFILL_ROLE} " if self.role == PREFILL_ROLE else ""
        return f"{self.order} {kind}{workers} instead of {self.ordered}"


@dataclass(frozen=True)
class EndpointDecision:
    """The verdicts of an endpoint's roles and the order that follows from them.

    `at` is CLOCK_MONOTONIC, in seconds. `devices`: held by all workers of the server (None: unknown), of at most
    `max_devices`. `acts`: whether the order is given; a planner that only observes would give it.
    """

    at: float
    endpoint: str
    policy: str
    verdicts: tuple[RoleVerdict, ...]
    devices: float | None
    max_devices: int
    acts: bool = True

    @property
    def order(self) -> ScaleEndpoint | None:
        """The order to the server; None if the numbers stay as they are."""
        changed = {each.role: each.order for each in self.verdicts if each.order != each.ordered}
        if not changed:
            return None
        prefill = changed.pop(PREFILL_ROLE, None)
        return ScaleEndpoint(self.endpoint, next(iter(changed.values()), None), prefill)

    @property
    def change(self) -> str:
        """The change in words: "chat: 4 workers instead of 2", with "would have" if the planner only observes."""
        changes = ", ".join(each.change for each in self.verdicts if each.change)
        would = "" if self.acts else "would have "
        return f"{self.endpoint}: {would}{changes}" if changes else f"{self.endpoint}: no change"

    @property
    def reasons(self) -> str:
        """The reasons in one line, by role if there are several."""
        if len(self.verdicts) == 1:
            return self.verdicts[0].reason
        return "; ".join(f"{each.role}: {each.reason}" for each in self.verdicts)

    @property
    def text(self) -> str:
        """Change and reasons in one line."""
        return f"{self.change} ({self.reasons})"

    @property
    def gist(self) -> tuple[str, ...]:
        """The decision without the numbers in its reasons, by which a repeated decision is recognised."""
        return self.change, *(f"{each.role} {each.gets} {_NUMBER.sub('#', each.reason)}" for each in self.verdicts)


@dataclass(frozen=True)
class OrderOutcome:
    """What became of an order. Not done: the server refused it or did not answer, and `note` says why."""

    done: bool
    note: str = ""


def event_of(decision: EndpointDecision, outcome: OrderOutcome | None) -> Event:
    """Return the event of a decision with an order. `outcome` is None if the planner only observes."""
    if outcome is None:
        return Event("planner", decision.change, decision.reasons)
    what = decision.change if outcome.done else f"not done: {decision.change}: {outcome.note}"
    return Event("scale", what, f"planner: {decision.reasons}")


# The port to whatever shows observations of endpoints and decisions about them.


class EndpointRecorder(Recorder, Protocol):
    """A recorder that receives, besides those of the graph's own workers, observations and decisions of endpoints."""

    def endpoints_observed(self, observation: EndpointsObservation, decisions: Sequence[EndpointDecision]) -> None:
        """Record a pull, with the decisions that were made at it."""

    def endpoint_decided(self, decision: EndpointDecision, outcome: OrderOutcome | None) -> None:
        """Record a decision that changes something, or whose gist is new. `outcome`: of its order; None if there is no
        order, or the planner only observes."""

    def endpoint_changed(self, event: Event) -> None:
        """Record what the server has done to an endpoint by itself: parked it, let it sleep, woken it, or given its
        devices to another one."""
