"""What is announced in the scopes of endpoints: workers are seen, and what is no process of ours is passed over."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from dynamo_local.bus.nats import RawMessage
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core import codec
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.subjects import Subjects


class Subscriptions:
    """A bus that only keeps who is called for which subjects."""

    def __init__(self) -> None:
        self.handlers: dict[str, Any] = {}

    def inbox(self) -> str:
        return "inbox"

    async def subscribe(self, subject: str, handler: Any) -> None:
        self.handlers[subject] = handler

    async def listen(self, subject: str, kind: Any, handler: Any) -> None:
        self.handlers[subject] = handler

    async def publish(self, subject: str, data: bytes) -> None:
        pass


@pytest.mark.parametrize("last", ["x", "", "many_", "many_chat@_VllmWorker", "\N{SNOWMAN}"])
def test_a_presence_under_no_watchers_name_is_passed_over(last: str) -> None:
    async def scenario() -> None:
        bus, subjects = Subscriptions(), Subjects("many")
        watch = FleetWatch(cast("Any", bus), subjects, everywhere=True)
        await watch.start()
        hear = bus.handlers[subjects.presences_of_endpoints]
        scope = subjects.presences_of_endpoints.replace("*", "chat@1").rpartition(".")[0]
        worker = Presence("many_chat@1_VllmWorker", "VllmWorker", "aggregated", "lease", 7, "ready")
        for name in (last, worker.watcher):
            await hear(RawMessage(f"{scope}.{name}", "", codec.encode(worker)))
        assert [presence.watcher for presence in watch.view.members()] == [worker.watcher]

    asyncio.run(scenario())
