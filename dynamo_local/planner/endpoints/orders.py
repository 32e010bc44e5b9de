"""Orders numbers of workers from the server."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_local.bus.nats import Bus
from dynamo_local.core.errors import BusError, DecodeError
from dynamo_local.core.messages.endpoints import EndpointsAnswer, EndpointStatus, ScaleEndpoint
from dynamo_local.core.planning.endpoints.decision import OrderOutcome
from dynamo_local.core.subjects import Subjects

_TIMEOUT_S = 10.0
"""The server answers before workers start or end."""


@dataclass(frozen=True)
class ScaleOrders:
    """Gives orders over the bus."""

    bus: Bus
    subjects: Subjects

    async def give(self, order: ScaleEndpoint) -> tuple[OrderOutcome, EndpointStatus | None]:
        """Give an order. Returns the endpoint's status after it too, None if it is not carried out."""
        try:
            answer = await self.bus.ask(self.subjects.endpoints, order, EndpointsAnswer, timeout_s=_TIMEOUT_S)
        except (BusError, DecodeError) as error:
            return OrderOutcome(False, str(error)), None
        if answer.refused is not None:
            return OrderOutcome(False, answer.refused.cause), None
        status = next((view.status for view in answer.endpoints if view.spec.name == order.name), None)
        return OrderOutcome(True), status
