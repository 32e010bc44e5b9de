"""REST under /v1/keys: passes orders about API keys on to the server, and answers as it does."""

from __future__ import annotations

import msgspec

from dynamo_local.bus.nats import Bus
from dynamo_local.core.errors import BusError, DecodeError
from dynamo_local.core.http.bounds.admission import Refusal
from dynamo_local.core.http.orders.keys import key_order_of, rendered_keys
from dynamo_local.core.messages.keys import KeysAnswer, ListKeys
from dynamo_local.core.subjects import Subjects

TIMEOUT_S = 30.0
"""Time for the server to carry out an order, in seconds."""


class KeyRest:
    """Carries out requests of administrators about keys."""

    def __init__(self, bus: Bus, subjects: Subjects, *, timeout_s: float = TIMEOUT_S) -> None:
        self._bus = bus
        self._subject = subjects.keys
        self._timeout_s = timeout_s

    async def __call__(self, method: str, path: str, body: bytes, by: str) -> tuple[int, bytes] | Refusal:
        """Return status and body of the answer, or why the order is not carried out. `by`: as in `key_order_of`."""
        order = key_order_of(method, path, body, by)
        if isinstance(order, Refusal):
            return order
        try:
            answer = await self._bus.ask(self._subject, order, KeysAnswer, timeout_s=self._timeout_s)
        except (BusError, DecodeError) as error:
            unsure = "" if isinstance(order, ListKeys) else "; look at the keys before you order it again"
            return Refusal(503, f"the server does not answer: {error}{unsure}", "ServiceUnavailableError")
        found = rendered_keys(order, answer)
        return found if isinstance(found, Refusal) else (found[0], msgspec.json.encode(found[1]))
