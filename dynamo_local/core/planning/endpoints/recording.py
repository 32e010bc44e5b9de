"""The port to whatever shows observations of endpoints and decisions about them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dynamo_local.core.messages.events import Event
from dynamo_local.core.planning.endpoints.decision import EndpointDecision, OrderOutcome
from dynamo_local.core.planning.endpoints.observation import EndpointsObservation
from dynamo_local.core.planning.recording import Recorder


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
