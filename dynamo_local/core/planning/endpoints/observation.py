"""Observations of all endpoints at a pull of the planner. What is unknown is None."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_local.core.endpoints.spec import EndpointSpec
from dynamo_local.core.fleet.view import AGGREGATED_ROLE, DECODE_ROLE, PREFILL_ROLE
from dynamo_local.core.messages.endpoints import EndpointStatus, EndpointView
from dynamo_local.core.planning.observation import Observation, WorkerSeen


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
