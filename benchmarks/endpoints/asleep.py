"""Endpoints of a real server that are asleep until a request comes: their mockers, their clients, their states."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.endpoints.mockers import mocker
from benchmarks.harness.generated import endpoint_of
from benchmarks.harness.servers import NAMESPACE, Server, ServerError, running, start_endpoints
from dynamo_local.control.client import ControlClient
from dynamo_local.control.operations import LIST_ENDPOINTS, Operation
from dynamo_local.core.errors import DynamoError
from dynamo_local.core.messages.reports import Event
from dynamo_local.load.client import Asking, Client
from dynamo_local.supervisor.server.reports.event_log import EventReader
from state.paths import StatePaths

STEP_MS = 10.0
"""Time of a mocker's step: one token of each request."""

_TIMEOUT_S = 900.0
_STATE_WITHIN_S = 120.0
_LOOK_EVERY_S = 0.02
_ORDER_S = 30.0


def sleeper(name: str, **fields: Any) -> dict[str, Any]:
    """An endpoint of one mocker, which has none until somebody asks."""
    args = {
        "mocker-step-base-ms": STEP_MS,
        "mocker-decode-us-per-seq": 0,
        "max-held": 1000,
        "hold-timeout-s": _TIMEOUT_S,
    }
    return mocker(name, args, min_workers=0, max_workers=1, **fields)


class Sleepers:
    """The endpoints that wake, while their server runs."""

    def __init__(self, server: Server) -> None:
        assert server.state_root is not None
        paths = StatePaths(server.state_root, NAMESPACE)
        self.server = server
        self._control = ControlClient(paths)
        self._events = EventReader(paths.events_file)

    def events(self) -> list[Event]:
        """The events since the last call."""
        return self._events.new()

    def client(self, name: str) -> Client:
        """A client of that endpoint, with connections of its own."""
        asking = Asking(name, is_chat=False, ignore_eos=True, extra={"temperature": 0})
        return Client(endpoint_of(self.server), asking, timeout_s=_TIMEOUT_S)

    async def order(self, operation: Operation, fields: Any = None, name: str = "") -> Any:
        """Give an order, or ask. Raises ServerError if it is refused."""
        try:
            return await asyncio.to_thread(self._control.do, operation, fields, timeout_s=_ORDER_S, name=name)
        except DynamoError as error:
            raise ServerError(f"{operation.name} is refused: {error}") from error

    async def until(self, name: str | None, *states: str) -> None:
        """Wait until that endpoint is in one of these states; None: until all are. Raises ServerError."""
        deadline = time.monotonic() + _STATE_WITHIN_S
        while True:
            listed = [one for one in (await self.order(LIST_ENDPOINTS))["data"] if name in (None, one["name"])]
            found = {one["name"]: one["status"]["state"] for one in listed}
            if set(found.values()) <= set(states):
                return
            if self.server.popen.poll() is not None or time.monotonic() > deadline:
                told = ", ".join(f"{each} is {state}" for each, state in found.items())
                raise ServerError(f"{told}, not {' or '.join(states)}:\n{self.server.last_lines()}")
            await asyncio.sleep(_LOOK_EVERY_S)


@contextlib.asynccontextmanager
async def sleeping(specs: Sequence[Mapping[str, Any]], options: Sequence[str] = ()) -> AsyncIterator[Sleepers]:
    """A server with these endpoints, once all are asleep."""
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        server = start_endpoints(Path(scratch), specs, options)
        async with running(server):
            await server.ready()
            sleepers = Sleepers(server)
            await sleepers.until(None, "asleep")
            yield sleepers
