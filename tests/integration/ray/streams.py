"""Streams of tokens from the workers of a server, through the product's dispatcher."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable

from components.frontend.dispatcher import BusDispatcher
from components.frontend.placing.assigner import LocalAssigner
from dynamo_local.bus.nats import Bus, BusAddress
from dynamo_local.bus.presence import Announcer, FleetWatch
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.subjects import Subjects
from dynamo_local.tasks import TaskGuard
from tests.chaos.tasks import Task

STREAMS = 16
TOKENS = 150
DEADLINE_S = 120.0


async def streamed(address: BusAddress, namespace: str, disturb: Callable[[], object] | None = None) -> float:
    """Send some requests at once, and check that each is answered exactly. `disturb`: called in a thread while all
    of them run. Returns the longest time after that for which one waited for a token, in seconds."""
    bus, subjects, tasks, lease = (
        await Bus.connect(address, name="test"),
        Subjects(namespace),
        TaskGuard(),
        secrets.token_hex(8),
    )
    fleet = FleetWatch(bus, subjects)
    dispatcher = BusDispatcher(bus, subjects, lease, fleet, LocalAssigner(fleet, lease), tasks)
    presence = Presence(f"{namespace}_Front_9", "Front", "frontend", lease, os.getpid(), "ready")
    try:
        async with asyncio.timeout(DEADLINE_S):
            await dispatcher.start()
            await fleet.start()
            tasks.spawn("fleet", fleet.run())
            tasks.spawn("presence", Announcer(bus, subjects, presence).run())
            while not fleet.view.routable():  # noqa: ASYNC110
                await asyncio.sleep(0.02)  # a worker tells who it is within a moment
            return await _answered(dispatcher, disturb)
    finally:
        await tasks.close()
        await bus.close()


async def _answered(dispatcher: BusDispatcher, disturb: Callable[[], object] | None) -> float:
    asked = {f"r{number}": Task(f"r{number}", [number, 1, 2], TOKENS) for number in range(STREAMS)}
    found: dict[str, list[int]] = {name: [] for name in asked}
    news: dict[str, float] = {}
    longest, disturbing = 0.0, None
    for task in asked.values():
        await dispatcher.submit(task.request())
    while any(len(found[name]) < TOKENS for name in asked):
        outputs = await dispatcher.outputs()
        now = time.monotonic()
        for delta in outputs.deltas:
            assert delta.error is None, delta.error
            found[delta.request_id] += delta.token_ids
            if disturbing is not None:
                longest = max(longest, now - news[delta.request_id])
            news[delta.request_id] = now
        if disturb is not None and disturbing is None and len(news) == STREAMS:
            disturbing = asyncio.create_task(asyncio.to_thread(disturb))
    assert found == {name: task.answer for name, task in asked.items()}
    if disturbing is not None:
        await disturbing
    return longest
