"""REST under /v1/endpoints: passes orders about endpoints on to the server, and answers as it does."""

from __future__ import annotations

from typing import Any

import msgspec

from dynamo_local.bus.nats import Bus
from dynamo_local.core.errors import BusError, DecodeError
from dynamo_local.core.http.bounds.admission import Refusal
from dynamo_local.core.http.orders.endpoints import order_of, rendered
from dynamo_local.core.messages.endpoints import EndpointsAnswer, ListEndpoints
from dynamo_local.core.subjects import Subjects

TIMEOUT_S = 30.0
"""Time for the server to take an order, in seconds. The order is carried out after that."""


class RestOrders:
    """Carries out requests of administrators."""

    def __init__(self, bus: Bus, subjects: Subjects, *, timeout_s: float = TIMEOUT_S) -> None:
        self._bus = bus
        self._subject = subjects.endpoints
        self._timeout_s = timeout_s

    async def __call__(self, method: str, path: str, body: bytes, by: str) -> tuple[int, bytes] | Refusal:
        """Return status and body of the answer, or why the order is not carried out. `by`: as in `order_of`."""
        order = order_of(method, path, body, by)
        if isinstance(order, Refusal):
            return order
        try:
            answer = await self._bus.ask(self._subject, order, EndpointsAnswer, timeout_s=self._timeout_s)
        except (BusError, DecodeError) as error:
            unsure = "" if isinstance(order, ListEndpoints) else "; look at the endpoint before you order it again"
            return Refusal(503, f"the server does not answer: {error}{unsure}", "ServiceUnavailableError")
        found: Any = rendered(order, answer)
        return found if isinstance(found, Refusal) else (found[0], msgspec.json.encode(found[1]))
