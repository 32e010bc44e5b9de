"""Takes up a new token of NATS when the server says so (supervisor/server/nats/rotation.py)."""

from __future__ import annotations

from dynamo_local.bus.nats import Bus
from dynamo_local.bus.subscriptions import Answer
from dynamo_local.core.messages.rotation import AddressChanged, AddressTaken
from dynamo_local.core.subjects import Subjects


async def follow_address(bus: Bus, subjects: Subjects, lease: str = "") -> None:
    """Connect anew whenever the address has changed, and tell the server. `lease`: of this process, if it has one.

    A process that does not hear of a change is disconnected when the old token ends, and finds the new one then.
    """

    async def on_change(_: AddressChanged, answer: Answer) -> None:
        await answer.send(AddressTaken(lease, await bus.renew()))

    await bus.serve(subjects.address_changes, AddressChanged, on_change)
