"""A part of a process's connection to NATS, whose subscriptions end together."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from nats.aio.msg import Msg as NatsMsg

from dynamo_local.bus.nats import Bus
from dynamo_local.bus.subscriptions import Subscription


class BusPart(Bus):
    """Uses the connection of another bus. `close` ends the subscriptions that were made here, and nothing else."""

    def __init__(self, bus: Bus) -> None:
        super().__init__(bus._client, bus._name)
        self._asks = bus._asks
        self._subscriptions: list[Subscription] = []

    async def close(self, *, deadline_s: float = 2.0) -> None:
        """End all subscriptions made here."""
        subscriptions, self._subscriptions = self._subscriptions, []
        for subscription in subscriptions:
            await subscription.unsubscribe()

    async def _subscribe(
        self, subject: str, receive: Callable[[NatsMsg], Awaitable[None]], queue: str = ""
    ) -> Subscription:
        subscription = await super()._subscribe(subject, receive, queue)
        self._subscriptions.append(subscription)
        return subscription
