"""How many devices the workers of a server hold over time, by its statefile: starting and ending ones count too."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

import msgspec

from benchmarks.harness.servers import NAMESPACE, Server
from dynamo_local.core.fleet.view import PREFILL_ROLE
from dynamo_local.planner.metrics import claims_of
from state.paths import StatePaths
from state.statefile.store import StateStore

_LOOK_S = 0.2


class Held(msgspec.Struct, frozen=True, array_like=True):
    """From `at_s` on, so many devices are held by workers of each role."""

    at_s: float
    prefill: float
    decode: float

    @property
    def devices(self) -> float:
        return self.prefill + self.decode


def device_seconds(held: Sequence[Held], begin_s: float, end_s: float) -> float:
    """Integral of the devices held between two times. What was held first was held before as well, and what was held
    last is held on. Raises ValueError if nothing is known."""
    if not held:
        raise ValueError("nothing is known of the devices")
    edges = [begin_s, *(min(max(each.at_s, begin_s), end_s) for each in held[1:]), end_s]
    return sum(
        (later - earlier) * each.devices for each, (earlier, later) in zip(held, itertools.pairwise(edges), strict=True)
    )


class DeviceLog:
    """Looks into the statefile now and then, and keeps what changes. An async context manager: times are seconds since
    it was entered."""

    def __init__(self, server: Server) -> None:
        assert server.state_root is not None
        self._store = StateStore(StatePaths(server.state_root, NAMESPACE))
        self.begun = 0.0
        """When it was entered (CLOCK_MONOTONIC, s)."""
        self._watching: asyncio.Task[None] | None = None
        self.held: list[Held] = []

    async def __aenter__(self) -> Self:
        self.begun = time.monotonic()
        await self._look()
        self._watching = asyncio.create_task(self._watch(), name="devices")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._watching is not None
        self._watching.cancel()
        with suppress(asyncio.CancelledError):
            await self._watching

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            await self._look()

    async def _look(self) -> None:
        claims = claims_of(await asyncio.to_thread(self._store.read))
        prefill = sum(claim.devices for claim in claims if claim.role == PREFILL_ROLE)
        found = Held(time.monotonic() - self.begun, prefill, sum(claim.devices for claim in claims) - prefill)
        if not self.held or (found.prefill, found.decode) != (self.held[-1].prefill, self.held[-1].decode):
            self.held.append(found)
