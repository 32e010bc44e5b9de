"""Orders numbers of workers from the server."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial

from dynamo_local.control.client import ControlClient
from dynamo_local.control.operations import SCALE_ENDPOINT
from dynamo_local.core.errors import DynamoError
from dynamo_local.core.messages.endpoints import EndpointStatus, view_of
from dynamo_local.core.planning.endpoints.decision import OrderOutcome, ScaleEndpoint

_TIMEOUT_S = 10.0
"""The server answers before workers start or end."""


@dataclass(frozen=True)
class ScaleOrders:
    """Gives orders by the server's control API."""

    server: ControlClient

    async def give(self, order: ScaleEndpoint) -> tuple[OrderOutcome, EndpointStatus | None]:
        """Give an order. Returns the endpoint's status after it too, None if it is not carried out."""
        fields = {"workers": order.workers, "prefill_workers": order.prefill_workers}
        give = partial(self.server.do, SCALE_ENDPOINT, fields, timeout_s=_TIMEOUT_S, name=order.name)
        try:
            return OrderOutcome(True), view_of(await asyncio.to_thread(give)).status
        except DynamoError as error:
            return OrderOutcome(False, error.cause), None
