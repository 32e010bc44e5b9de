"""What the processes of a running `dynamo serve` say of themselves on the bus, with the times when they said it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from benchmarks.harness.servers import NAMESPACE, READY_WITHIN_S, Server, ServerError
from dynamo_local.bus.address import BusAddress
from dynamo_local.bus.nats import Bus, Subscription
from dynamo_local.core.messages.presence import Presence
from dynamo_local.core.messages.work import TokenBatch
from dynamo_local.core.names import FIRST_OF_MAIN
from dynamo_local.core.subjects import Subjects
from state.paths import StatePaths

WORKER_ROLE = "aggregated"
_POLL_S = 0.02


class PresenceLog:
    """Listens from as early as there is a bus. An async context manager.

    Times are seconds since boot, as those of `accounting.Process.started_s`.
    """

    def __init__(self, server: Server, revision: str = FIRST_OF_MAIN) -> None:
        """`revision`: that whose workers are listened to."""
        assert server.state_root is not None
        self._server = server
        self._bus_file = StatePaths(server.state_root, NAMESPACE).bus_file
        self._subjects = Subjects(NAMESPACE, revision)
        self._bus: Bus | None = None
        self._heard: list[tuple[float, Presence]] = []
        self._news = asyncio.Event()

    async def __aenter__(self) -> Self:
        deadline = time.monotonic() + READY_WITHIN_S
        while not self._bus_file.exists():
            if self._server.popen.poll() is not None or time.monotonic() > deadline:
                raise ServerError(f"{self._server.name} has no bus:\n{self._server.last_lines()}")
            await asyncio.sleep(_POLL_S)
        self._bus = await Bus.connect(BusAddress.load(self._bus_file), name="benchmark", deadline_s=60.0)
        await self._bus.listen(self._subjects.presences, Presence, self._hear)
        await self._bus.publish(self._subjects.probe, b"")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bus is not None:
            await self._bus.close()

    def latest(self) -> dict[str, Presence]:
        """The last word of each worker process, by lease."""
        return {presence.lease: presence for _, presence in self._heard if presence.role == WORKER_ROLE}

    def phases(self, lease: str) -> dict[str, float]:
        """When each state, or stage of the start, of a process was first told of."""
        told: dict[str, float] = {}
        for at, presence in self._heard:
            if presence.lease == lease:
                told.setdefault("ready" if presence.state == "ready" else presence.detail or presence.state, at)
        return told

    async def ready_worker(self, known: frozenset[str] = frozenset()) -> Presence:
        """Wait for a ready worker whose lease is not among the known ones."""
        async with asyncio.timeout(READY_WITHIN_S):
            while True:
                self._news.clear()
                for lease, presence in self.latest().items():
                    if lease not in known and presence.state == "ready":
                        return presence
                await self._news.wait()

    async def watch_tokens(self, take: Callable[[TokenBatch], None]) -> Subscription:
        """Have `take` called for every message of tokens that any worker sends."""
        assert self._bus is not None

        async def on_tokens(batch: TokenBatch) -> None:
            take(batch)

        return await self._bus.listen(self._subjects.tokens("*"), TokenBatch, on_tokens)

    async def _hear(self, presence: Presence) -> None:
        self._heard.append((time.clock_gettime(time.CLOCK_BOOTTIME), presence))
        self._news.set()
