"""A process that is silent because it, or NATS, waits for a core is not taken for gone. Real processes and bus."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, suppress

import pytest

from dynamo_local.bus.nats import Bus
from dynamo_local.bus.presence import FleetWatch
from dynamo_local.core import codec
from dynamo_local.core.fleet.view import TTL_S, Change, Happened
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.subjects import Subjects
from tests.integration.conftest import Connect
from tests.integration.fleet_of_fakes import until
from tests.integration.nats_process import NatsProcess
from tests.unit.state.builders import spinning

pytestmark = pytest.mark.integration

CORE = min(os.sched_getaffinity(0))
LONG_S = TTL_S + 1.5
"""A process whose silence is not excused is gone by then, on a quiet machine."""


class Watching:
    """A fleet watch, running."""

    def __init__(self, bus: Bus, subjects: Subjects) -> None:
        self.bus = bus
        self.subjects = subjects
        self.watch = FleetWatch(bus, subjects)
        self.left: list[str] = []
        self.watch.subscribe(self._note)

    def _note(self, change: Change) -> None:
        if change.what is Happened.LEFT:
            self.left.append(change.presence.lease)

    async def hear(self, lease: str, pid: int) -> None:
        """The last word of a process."""
        presence = Presence(f"{self.subjects.namespace}_Worker_{lease}", "Worker", "aggregated", lease, pid, "ready")
        await self.bus.publish(self.subjects.presence(presence.watcher, presence.role), codec.encode(presence))
        await until(lambda: self.watch.view.get(lease) is not None)


@pytest.fixture
async def watching(connect: Connect, subjects: Subjects) -> AsyncIterator[Watching]:
    watching = Watching(await connect(), subjects)
    await watching.watch.start()
    running = asyncio.create_task(watching.watch.run())
    yield watching
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


async def test_who_waits_for_a_core_is_kept_and_who_is_stopped_there_is_not(watching: Watching) -> None:
    with ExitStack() as processes:
        starved = processes.enter_context(spinning(CORE, nice=19))
        stopped = processes.enter_context(spinning(CORE))
        # Several, so that the process waits for most of the time even where niceness makes no difference to it.
        for _ in range(3):
            processes.enter_context(spinning(CORE))
        stopped.send_signal(signal.SIGSTOP)
        await watching.hear("starved", starved.pid)
        await watching.hear("stopped", stopped.pid)
        silent_since = time.monotonic()
        await until(lambda: bool(watching.left))
        assert watching.left == ["stopped"]
        await until(lambda: time.monotonic() - silent_since > LONG_S)
        assert watching.left == ["stopped"]
        starved.send_signal(signal.SIGSTOP)
        await until(lambda: watching.left == ["stopped", "starved"])


async def test_a_bus_that_stands_still_makes_nobody_absent(own_nats: NatsProcess, subjects: Subjects) -> None:
    bus = await Bus.connect(own_nats.address, name="watching")
    watching = Watching(bus, subjects)
    await watching.watch.start()
    running = asyncio.create_task(watching.watch.run())
    beating = asyncio.create_task(beat(watching))
    try:
        await until(lambda: watching.watch.view.get("w1") is not None)
        own_nats.signal(signal.SIGSTOP)
        await asyncio.sleep(LONG_S)
        own_nats.signal(signal.SIGCONT)
        await asyncio.sleep(TTL_S / 2)
        assert watching.left == []
        beating.cancel()
        await until(lambda: watching.left == ["w1"])
    finally:
        own_nats.signal(signal.SIGCONT)
        running.cancel()
        beating.cancel()
        await asyncio.gather(running, beating, return_exceptions=True)
        await bus.close()


async def beat(watching: Watching) -> None:
    """Publish at every beat, as a process that is alive and mostly sleeps."""
    while True:
        await watching.hear("w1", 1)
        await asyncio.sleep(0.5)
