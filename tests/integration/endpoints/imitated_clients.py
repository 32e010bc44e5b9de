"""Clients of endpoints and the frontend that holds their requests, both imitated. Workers are real, requests not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from dynamo_local.control.client import ControlClient
from dynamo_local.control.operations import LIST_ENDPOINTS, WAKE_ENDPOINT
from dynamo_local.core.messages.endpoints import Board
from dynamo_local.core.names import endpoint_of
from state.paths import StatePaths

_EVERY_S = 0.05
_ASK_S = 1.0
_BUSY_S = 4.0


@dataclass(eq=False)
class Request:
    """A request for an endpoint that runs for so long, in seconds. `began_at`, `ended_at`: CLOCK_MONOTONIC."""

    endpoint: str
    runs_s: float
    began_at: float | None = None
    ended_at: float | None = None


@dataclass
class Clients:
    """Runs requests as frontends do: they begin where a worker is ready and the endpoint does not yield, and are held
    otherwise, while the server is asked to wake the endpoint. `demand`: the file that the imitated frontend announces.
    `cut`: requests whose endpoint had no worker any more while they ran."""

    paths: StatePaths
    demand: Path
    requests: list[Request] = field(default_factory=list)
    cut: list[Request] = field(default_factory=list)
    busy: frozenset[str] = frozenset()
    """Endpoints that get another request as soon as half of the last one has passed, while others are answered."""
    _asked_at: dict[str, float] = field(default_factory=dict)

    def run(self, requests: list[Request], within_s: float = 120, busy: Collection[str] = ()) -> None:
        """Keep endpoints busy, send the requests once each of these has begun two, and return when all are answered."""
        self.busy = frozenset(busy)
        asyncio.run(self._run(requests, within_s))

    async def _run(self, requests: list[Request], within_s: float) -> None:
        async with asyncio.timeout(within_s):
            while not (requests[0] in self.requests and all(one.ended_at for one in self.requests)):
                if not all(one.ended_at for one in requests):
                    self._keep_busy(time.monotonic())
                if requests[0] not in self.requests and all(self._begun(name) >= 2 for name in self.busy):
                    self.requests += requests
                await self._step()
                await asyncio.sleep(_EVERY_S)
        self._tell()

    async def _step(self) -> None:
        server, now = ControlClient(self.paths), time.monotonic()
        listed = (await asyncio.to_thread(server.do, LIST_ENDPOINTS))["data"]
        ready = {endpoint["name"]: endpoint["status"]["ready"] for endpoint in listed}
        board = msgspec.json.decode(self.paths.board_file.read_bytes(), type=Board)
        takes = {endpoint_of(one.revision) for one in board.revisions if one.takes_requests and not one.yields}
        for one in self.requests:
            if one.began_at is None and ready[one.endpoint] and one.endpoint in takes:
                one.began_at = now
            elif one.began_at is not None and one.ended_at is None:
                self._go_on(one, ready, now)
        self._tell()
        for name in {one.endpoint for one in self.requests if one.began_at is None and not ready[one.endpoint]}:
            if now - self._asked_at.get(name, 0) >= _ASK_S:
                self._asked_at[name] = now
                await asyncio.to_thread(server.do, WAKE_ENDPOINT, query={"asked": "true"}, name=name)

    def _keep_busy(self, now: float) -> None:
        for name in self.busy:
            mine = [one for one in self.requests if one.endpoint == name]
            last = mine[-1] if mine else None
            if last is None or (last.began_at is not None and now - last.began_at > last.runs_s / 2):
                self.requests.append(Request(name, _BUSY_S))

    def _begun(self, name: str) -> int:
        return sum(one.endpoint == name and one.began_at is not None for one in self.requests)

    def _go_on(self, one: Request, ready: Mapping[str, int], now: float) -> None:
        if not ready[one.endpoint] and one not in self.cut:
            self.cut.append(one)
        if now >= (one.began_at or now) + one.runs_s:
            one.ended_at = now

    def _tell(self) -> None:
        found: dict[str, tuple[int, int]] = {}
        for one in (one for one in self.requests if one.ended_at is None):
            in_flight, held = found.get(one.endpoint, (0, 0))
            found[one.endpoint] = in_flight + 1, held + (one.began_at is None)
        whole = self.demand.with_suffix(".new")
        whole.write_bytes(msgspec.json.encode(found))
        whole.rename(self.demand.with_suffix(".json"))
